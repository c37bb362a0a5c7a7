"""Measure a model beside its base, and keep what was found: a JSON file in the folder that it is about."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ridgeline import __version__
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.files import write_whole
from ridgeline.quality.code import CodeComparison
from ridgeline.quality.comparison import Comparison, Level, compare
from ridgeline.quality.scorer import Scorer
from ridgeline.quality.texts import Texts, make_documents
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.jsonfile import read_json_object
from ridgeline.weights.quality import AS_STORED, quality_path, read_quality

WINDOW = 1024  # tokens that a model sees at most, where it can see so many

Report = Callable[[int, int], None]
"""Is told the tokens that are done, and those in all."""


def silent(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two models: its name, what it weighs, and what was chosen for it (dtype, quantization, kernels)."""

    name: str
    weight_bytes: int
    choices: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Says what was measured, of which models, on which text."""

    model: Side
    base: Side
    text: str
    text_sha256: str
    window: int
    comparison: Comparison
    level: Level | None
    code: CodeComparison | None = None
    version: str = __version__

    def as_json(self) -> bytes:
        """Return one JSON object; numbers that are none become null."""
        return msgspec.json.encode(self)


def base_config(config: EngineConfig, model: str | None, options: Mapping[str, object]) -> EngineConfig:
    """Return the configuration of a base: `model`, or that of `config`, in float32 with `options` on top.

    Its activations are not rounded to 8 bits, unless `options` ask for it.
    """
    wanted = {"dtype": "float32", "num_threads": config.num_threads, "backend": config.backend.backend, **options}
    return EngineConfig.of(model or config.model.model, **wanted)


def open_base(config: EngineConfig, window: int) -> Scorer:
    """Open a base: matrices of integers, where it has any, get inputs of 16 bits unless others were asked for."""
    if config.quantize.inputs == "auto":
        try:
            return Scorer(replace(config, quantize=replace(config.quantize, inputs="int16")), window)
        except ConfigError:  # no matrix of integers
            pass
    return Scorer(config, window)


def evaluate(
    config: EngineConfig,
    base: EngineConfig,
    texts: Texts,
    *,
    window: int = WINDOW,
    max_tokens: int | None,
    report: Report = silent,
) -> Evaluation:
    """Measure both models on the texts; `report` is told tokens done and in all.

    Raises ConfigError for a base of another vocabulary, a text without tokens, and as opening a model does.
    """
    of_base = open_base(base, window)
    of_model = Scorer(config, of_base.window)
    if of_model.window < of_base.window:
        of_base = open_base(base, of_model.window)
    documents = make_documents(texts, of_model.tokenizer(), of_model.window, max_tokens)
    sample = documents[0].windows[0]
    if of_model.vocab_size != of_base.vocab_size or _spelled(of_model, sample) != _spelled(of_base, sample):
        raise ConfigError(
            f"{of_base.name} has another vocabulary than {of_model.name}: a KL compares the same tokens; give "
            "the model that it was made of"
        )
    total = sum(document.num_tokens for document in documents)
    found = compare(documents, of_model.logits, of_base.logits, lambda done: report(done, total))
    return Evaluation(
        model=_side(of_model),
        base=_side(of_base),
        text=texts.source,
        text_sha256=texts.sha256,
        window=of_model.window,
        comparison=found,
        level=found.level,
    )


def store_input_cost(
    config: EngineConfig, texts: Texts, *, window: int = WINDOW, max_tokens: int, report: Report = silent
) -> Evaluation:
    """Measure inputs of 8 bits beside those of 16, and store the KL where `quantize_inputs` auto looks for it.

    Raises ConfigError for a model without a matrix of integers, and as `evaluate` does.
    """
    model, base = (replace(config, quantize=replace(config.quantize, inputs=each)) for each in ("int8", "int16"))
    found = evaluate(model, base, texts, window=window, max_tokens=max_tokens, report=report)
    path = ModelFolder.open(config.model.model, config.model.revision).path
    costs = {**read_quality(path).inputs, config.quantize.scheme or AS_STORED: found.comparison.kl}
    write_quality(path, {"inputs": costs})
    return found


def write_quality(model: Path, found: Mapping[str, object]) -> None:
    """Store what was found of a model beside its weights, in place of what was found before, whole or not at all."""
    path = quality_path(model)
    document = {**(read_json_object(path) if path.exists() else {}), **found}
    write_whole(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def _side(scorer: Scorer) -> Side:
    choices = {name: choice.value for name, choice in scorer.choices.items()}
    return Side(name=scorer.name, weight_bytes=scorer.weight_bytes, choices=choices)


def _spelled(scorer: Scorer, token_ids: Sequence[int]) -> list[bytes]:
    tokenizer = scorer.tokenizer()
    return [tokenizer.token_bytes(token_id) for token_id in token_ids]
