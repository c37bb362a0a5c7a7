"""ModelFolder: where a model's files are, what its config says, and the sampling that its authors recommend."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ridgeline.core.errors import ConfigError, MissingModelError, ModelLoadError
from ridgeline.core.log import get_logger
from ridgeline.core.params import PoolingKind
from ridgeline.spec.reader import ConfigReader
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.jsonfile import read_json_object

BUNDLED_MODELS = Path(__file__).parents[1] / "models"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
HUB_FILES_LEFT_OUT = ["*/*", "consolidated*"]  # other formats of the same weights
GGUF_SUFFIX = ".gguf"
QUANTIZATION = "quantization_config"  # of config.json
# Files of their own with these settings, and whose they are.
SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
POOLING_CONFIG = Path("1_Pooling") / "config.json"
POOLING_MODES: Mapping[str, PoolingKind] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
NO_TOKEN = (1 << 32) - 1  # how some files say that there is no such token
HUB_ID = re.compile(r"[A-Za-z0-9._-]{1,96}(/[A-Za-z0-9._-]{1,96})?")

if TYPE_CHECKING:
    from ridgeline.weights.gguf.model import GgufModel

log = get_logger("weights")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The values that generation_config.json recommends; None where it is silent. `temperature` 0 is greedy decoding.

    `eos_token_ids` falls back to config.json, and is empty where neither names an end of sequence.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that is on disk. Its `name` is what the caller asked for, and what a server calls the model by default.

    `path` is a folder in the format of Hugging Face, or with `gguf` the GGUF file that is the whole model.
    """

    path: Path
    config: Mapping[str, object]
    generation_config: GenerationDefaults
    name: str
    gguf: "GgufModel | None" = None

    @classmethod
    def open(cls, name_or_path: str | Path, revision: str | None = None) -> "ModelFolder":
        """Open a folder, a .gguf file, a bundled or fetched model by name, or a hub id (all files of one commit).

        In this order. Raises ModelLoadError where there is no such model or its files are broken, ConfigError for
        values that cannot be honoured.
        """
        path, name = _locate(name_or_path, revision)
        if path.suffix == GGUF_SUFFIX and not path.is_dir():
            from ridgeline.weights.gguf.model import GgufModel

            model = GgufModel.open(path)
            return cls(path, model.config, _gguf_defaults(model), name, model)
        config = _with_quantization(path, read_json_object(path / "config.json"))
        return cls(path, config, _read_generation_config(path, config), name)

    def tokenizer(self) -> Tokenizer | None:
        """Return the model's own tokenizer; None where it has none. Raises ModelLoadError for a broken one."""
        if self.gguf is not None:
            from ridgeline.text.gguf import gguf_tokenizer

            return gguf_tokenizer(self.gguf.metadata, self.path)
        return Tokenizer.from_folder(self.path)

    def text_tokenizer(self) -> Tokenizer:
        """Return the tokenizer for text that has to be read. Raises ConfigError where there is none."""
        if (tokenizer := self.tokenizer()) is None:
            raise ConfigError(f"{self.name} has no tokenizer, so it reads no text; put tokenizer.json into its folder")
        return tokenizer

    def pooling(self) -> PoolingKind | None:
        """Return how texts become vectors, as sentence-transformers has it; None where the folder is silent.

        Raises ModelLoadError for several kinds at once, or one that is not supported.
        """
        path = self.path / POOLING_CONFIG
        if not path.is_file():
            return None
        config = read_json_object(path)
        asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        if len(asked) != 1 or asked[0] not in POOLING_MODES:
            known = ", ".join(POOLING_MODES)
            raise ModelLoadError(f"{path}: exactly one of {known} must be true, not {', '.join(asked) or 'none'}")
        return POOLING_MODES[asked[0]]

    def dimensions(self) -> tuple[int, ...] | None:
        """Return to how many dimensions vectors may be cut: () any number, None where they were not trained so."""
        known = self.config.get("matryoshka_dimensions")
        if isinstance(known, list):
            sizes = cast("list[object]", known)
            return tuple(size for size in sizes if isinstance(size, int))
        return () if self.config.get("is_matryoshka") is True else None

    def weight_files(self) -> Sequence[Path]:
        """Return the files that hold the weights."""
        return self.gguf.files if self.gguf is not None else sorted(self.path.glob("*.safetensors"))


def _locate(name_or_path: str | Path, revision: str | None) -> tuple[Path, str]:
    text = str(name_or_path)
    try:
        folder = Path(name_or_path).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, no such user
        raise MissingModelError(f"{text[:200]!r} is no path and no Hugging Face id: {str(error)[:200]}") from error
    is_file = exists and folder.suffix == GGUF_SUFFIX and not is_folder
    if exists and not is_folder and not is_file:
        raise ModelLoadError(f"{text} is a file; give a .gguf file, or the folder of config.json and *.safetensors")
    if not exists and (isinstance(name_or_path, Path) or not HUB_ID.fullmatch(text) or text.startswith(".")):
        raise MissingModelError(f"{text[:200]!r} is neither an existing folder nor a Hugging Face id like 'org/model'")
    bundled = BUNDLED_MODELS / text
    local = folder if exists else bundled if bundled.is_dir() else None
    if local is None:
        from ridgeline.weights.fetch import PUBLISHED, fetched

        local = fetched(text)
        if local is None and text in PUBLISHED:
            raise MissingModelError(f"{text} is not here yet; fetch it with: ridgeline pull {text}")
    if local is None:
        return download(text, revision), text
    if revision is not None:
        raise ConfigError(f"revision {revision!r} was asked of {local}, but only a hub id has revisions")
    if not exists:
        return local, text
    return local, local.stem if is_file else local.resolve().name


def download(hub_id: str, revision: str | None) -> Path:
    """Fetch all files of one commit from the hub, unless they are in its cache. Raises MissingModelError."""
    import httpx  # with the hub's client a quarter of a second that no model on disk needs
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        path = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_LEFT_OUT
        )
    except (OSError, ValueError, HFValidationError, httpx.HTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        failed = f"is not a local folder and could not be fetched from the Hugging Face hub: {reason[:300]}"
        advice = "Check the name, the network and your access to the model, or give the path of a folder."
        raise MissingModelError(f"{hub_id!r} {failed} {_meant(hub_id)}{advice}") from error
    return Path(path)


def _meant(name: str) -> str:
    """Return the model at hand whose name is spelled almost so, as a question; empty where there is none."""
    from ridgeline.weights.fetch import PUBLISHED

    bundled = [path.name for path in BUNDLED_MODELS.iterdir() if path.is_dir()]
    close = get_close_matches(name, [*PUBLISHED, *bundled], n=1)
    return f"Did you mean {close[0]}? " if close else ""


def _with_quantization(folder: Path, config: Mapping[str, object]) -> Mapping[str, object]:
    """Return config.json with its quantization_config where families of one model type have it.

    It may stand in `text_config`, as `compression_config` or MLX's `quantization`, in AutoGPTQ's quantize_config.json,
    AutoAWQ's quant_config.json or ModelOpt's hf_quant_config.json; those get the name of their format. Raises
    ModelLoadError for a file that is no JSON object.
    """
    inner = config.get("text_config")
    places = (config, cast("Mapping[str, object]", inner) if isinstance(inner, dict) else {})
    spelled = (place.get(key) for place in places for key in (QUANTIZATION, "compression_config"))
    found = next((settings for settings in spelled if settings is not None), None)
    own = config.get("quantization")
    if isinstance(own, dict) and not (isinstance(found, dict) and "quant_method" in found):
        found = {"quant_method": "mlx", **cast("Mapping[str, object]", own)}
    for name, method in SETTINGS_FILES.items():
        if found is None and (folder / name).is_file():
            found = {"quant_method": method, **read_json_object(folder / name)}
    if found is config.get(QUANTIZATION):
        return config
    return {key: value for key, value in config.items() if key != "compression_config"} | {QUANTIZATION: found}


def _gguf_defaults(model: "GgufModel") -> GenerationDefaults:
    """Read what the file's keys recommend; a model may end its turn with another token than a text."""
    read = ConfigReader(model.metadata, str(model.path))

    def token_id(kind: str) -> int | None:
        value = read.optional_integer(f"tokenizer.ggml.{kind}_token_id", low=0, high=NO_TOKEN)
        return None if value == NO_TOKEN else value

    ends = [token_id(kind) for kind in ("eos", "eot", "eom")]
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=token_id("bos"),
        pad_token_id=token_id("padding"),
        temperature=read.optional_number("general.sampling.temp", low=0.0, high=100.0),
        top_p=read.optional_number("general.sampling.top_p", low=1e-9, high=1.0),
        top_k=read.optional_integer("general.sampling.top_k", low=-1),
        min_p=read.optional_number("general.sampling.min_p", low=0.0, high=1.0),
        repetition_penalty=read.optional_number("general.sampling.penalty_repeat", low=0.01, high=100.0),
    )


def _read_generation_config(folder: Path, config: Mapping[str, object]) -> GenerationDefaults:
    path = folder / "generation_config.json"
    values = read_json_object(path) if path.exists() else {}
    read = ConfigReader(values, "generation_config.json")
    keys = ("eos_token_id", "bos_token_id", "pad_token_id")
    ids = {key: config.get(key) if values.get(key) is None else values[key] for key in keys}
    defaults = GenerationDefaults(
        eos_token_ids=_token_ids(ids["eos_token_id"], config.get("vocab_size")),
        bos_token_id=_token_id("bos_token_id", ids["bos_token_id"]),
        pad_token_id=_token_id("pad_token_id", ids["pad_token_id"]),
        temperature=read.optional_number("temperature", low=0.0, high=100.0),
        top_p=read.optional_number("top_p", low=1e-9, high=1.0),
        top_k=read.optional_integer("top_k", low=-1),
        min_p=read.optional_number("min_p", low=0.0, high=1.0),
        repetition_penalty=read.optional_number("repetition_penalty", low=0.01, high=100.0),
        max_new_tokens=read.optional_integer("max_new_tokens"),
    )
    if not read.flag("do_sample", True):  # said so, not merely silent
        defaults = replace(defaults, temperature=0.0, top_p=None, top_k=None, min_p=None)
    read.ignore("_from_model_config")
    dropped = [key for key in read.unread() if values[key]]
    if dropped:
        log.warning("%s: not honoured: %s", path, ", ".join(dropped))
    return defaults


def _token_ids(value: object, vocab_size: object) -> tuple[int, ...]:
    """Read eos_token_id, which is one id, or a list of them (Llama 3)."""
    ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        in_vocabulary = not isinstance(vocab_size, int) or (isinstance(token_id, int) and token_id < vocab_size)
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 or not in_vocabulary:
            known = f"a token id below vocab_size={vocab_size}, or a list of them"
            raise ConfigError(f"eos_token_id={str(value)[:120]} is invalid; it must be {known}")
    return tuple(cast("list[int]", ids))


def _token_id(key: str, value: object) -> int | None:
    if value is None or value == -1:  # older configs write -1 for none
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ConfigError(f"{key}={str(value)[:120]} is invalid; it must be a token id")
    return value
