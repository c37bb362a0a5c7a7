"""A GGUF file as a model: its config, its sampling defaults, and its tensors as program weights.

Called by weights/folder.py and weights/loader.py. What an architecture's keys and tensors mean is in spec/gguf.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.spec import gguf
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec, Rename
from ridgeline.weights.checkpoint import DTYPES, TensorEntry
from ridgeline.weights.gguf.reader import GgufFile, GgufTensor

MAX_SPLITS = 1000
MAX_FACTORS = 1024
SPLIT_NAME = re.compile(r"(.+)-00001-of-([0-9]{5})\.gguf")
DTYPE_NAMES = {"F32": "float32", "F16": "float16"}  # of all others bfloat16: they hold no more


@dataclass(frozen=True, slots=True)
class GgufModel:
    """An opened file, or all files of a split one. `config` is what config.json would say."""

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    architecture: str
    config: Mapping[str, object]

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        """Raises ModelLoadError for a broken or hostile file, and for a model that this project does not run."""
        file = GgufFile.open(path)
        others = [GgufFile.open(other) for other in _other_splits(file)]
        tensors = dict(file.tensors)
        for other in others:
            for name, tensor in other.tensors.items():
                if name in tensors:
                    raise ModelLoadError(f"{other.path}: tensor {name[:80]!r} is also in {tensors[name].file.name}")
                tensors[name] = tensor
        expected = file.metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise ModelLoadError(
                f"{path}: split.tensors.count is {expected}, but the files have {len(tensors)} tensors"
            )
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelLoadError(f"{path}: general.architecture is missing or no text; it is no model")
        try:
            config = _read_config(architecture, file.metadata, tensors)
            read_spec(config)
        except ConfigError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        files = (path, *(other.path for other in others))
        return cls(path, files, file.metadata, tensors, architecture, config)


class GgufCheckpoint:
    """The tensors of a GGUF model in the row order, with the offsets and in the dtypes of a checkpoint.

    As `weights.checkpoint.Checkpoint`; what is stored in blocks becomes float32.
    """

    def __init__(self, model: GgufModel, spec: DecoderSpec) -> None:
        self.path = model.path
        self._tensors = {name: model.tensors[name] for name in model.tensors if name not in gguf.FACTOR_TENSORS}
        self._stored = _expand(gguf.architecture(model.architecture).tensors(spec), len(spec.layers))
        self.entries: Mapping[str, TensorEntry] = {
            name: TensorEntry(tensor.file, tensor.shape, tensor.type.name if tensor.type.name in DTYPES else "F32")
            for name, tensor in self._tensors.items()
        }

    def renames(self) -> Sequence[Rename]:
        """What each tensor becomes, one per tensor that there may be."""
        return [stored.rename for stored in self._stored.values()]

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, one in memory at a time. Raises ModelLoadError for a damaged one."""
        for name in names:
            stored, tensor = self._stored[name], _plain(name, self._tensors[name])
            if stored.paired_rows:
                tensor = _unpaired(tensor, stored.paired_rows)
            yield name, tensor + stored.offset if stored.offset else tensor


def _expand(stored: Sequence[gguf.Stored], num_layers: int) -> Mapping[str, gguf.Stored]:
    """By tensor name, `{i}` replaced by every layer number."""
    expanded: dict[str, gguf.Stored] = {}
    for item in stored:
        for layer in map(str, range(num_layers if "{i}" in item.rename.source else 1)):
            source = item.rename.source.replace("{i}", layer)
            targets = tuple(target.replace("{i}", layer) for target in item.rename.targets)
            expanded[source] = gguf.Stored(
                Rename(source, targets, item.rename.transpose), item.paired_rows, item.offset
            )
    return expanded


def _plain(name: str, tensor: GgufTensor) -> torch.Tensor:
    data = tensor.read()
    if tensor.type.name in DTYPES:
        return torch.from_numpy(data).view(DTYPES[tensor.type.name]).view(tensor.shape)
    try:
        return torch.from_numpy(tensor.type.dequantize(data, tensor.shape))
    except ValueError as error:
        raise ModelLoadError(f"{tensor.file}: tensor {name!r}: {error}; the file is damaged") from error


def _unpaired(tensor: torch.Tensor, head_rows: int) -> torch.Tensor:
    """Rows 0, 1, 2, 3 ... of each head as 0, 2, ..., 1, 3, ...: the halves that rotate together one after the other."""
    return tensor.unflatten(0, (-1, head_rows // 2, 2)).transpose(1, 2).reshape(tensor.shape)


def _other_splits(first: GgufFile) -> list[Path]:
    """The files beside the first one of a split model. Raises ModelLoadError for any file but the first."""
    count, number = first.metadata.get("split.count", 1), first.metadata.get("split.no", 0)
    if count in (0, 1) and number == 0:
        return []
    match = SPLIT_NAME.fullmatch(first.path.name)
    if number != 0 or not isinstance(count, int) or not 1 < count <= MAX_SPLITS or not match or int(match[2]) != count:
        raise ModelLoadError(
            f"{first.path} is number {str(number)[:20]} of {str(count)[:20]} files; give the first one, "
            "whose name ends in -00001-of-<count>.gguf"
        )
    return [first.path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]


def _read_config(
    architecture: str, metadata: Mapping[str, object], tensors: Mapping[str, GgufTensor]
) -> dict[str, object]:
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for name in set(gguf.FACTOR_TENSORS) & set(tensors):
        tensor = tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
            raise ConfigError(f"tensor {name} must be a list of at most {MAX_FACTORS} F32 numbers")
        own[name] = _plain(name, tensor).tolist()
    config = gguf.read_config(architecture, own, {name: tensor.shape for name, tensor in tensors.items()})
    by_type: dict[str, int] = {}
    for tensor in tensors.values():
        by_type[tensor.type.name] = by_type.get(tensor.type.name, 0) + tensor.num_bytes
    most = max(by_type, key=lambda kind: by_type[kind])
    return config | {"dtype": DTYPE_NAMES.get(most, "bfloat16")}
