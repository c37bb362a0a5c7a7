"""ModelConfig -> what is known of a model before a backend computes it: its spec, its program, its adapters."""

from collections.abc import Mapping

from ridgeline.backends.base import ModelSource
from ridgeline.core.config import Choice, EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.log import get_logger
from ridgeline.decoding.random_sample import MAX_COLUMNS
from ridgeline.engine.client import EngineInfo
from ridgeline.program.lower import lower
from ridgeline.program.passes.adapt import adapted
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.lora import ranks, read_adapter
from ridgeline.weights.quality import read_quality

_log = get_logger("build")


def open_model(config: EngineConfig) -> ModelSource:
    """Find the folder and read everything but the weights; the program is for the longest context that may be chosen.

    Raises ConfigError for what the model cannot be asked for, ModelLoadError for broken files.
    """
    folder = ModelFolder.open(config.model.model, config.model.revision)
    spec = read_spec(folder.config)
    base = lower(spec, config.model.max_model_len, hidden=embeds(config.model, spec))
    adapters = [read_adapter(name, path, spec, base) for name, path in config.adapters.items()]
    largest, most = ranks(adapters), config.max_loras or len(adapters)
    if config.max_loras:
        linears = {op.weights[0] for op in base.ops if op.kind == "linear"}
        largest = {target: max(config.max_lora_rank, largest.get(target, 0)) for target in linears}
    return ModelSource(folder, spec, base, adapted(base, largest, most), adapters, quality=read_quality(folder.path))


def describe(
    model: ModelSource, config: EngineConfig, max_model_len: int, choices: Mapping[str, Choice], weight_bytes: int
) -> EngineInfo:
    """Return what clients may know of the model as it is served. Raises ModelLoadError for unknown pooling."""
    scheduler, spec = config.scheduler, model.spec
    whole = spec.diffusion is not None or spec.head is None  # its prompts are not cut
    return EngineInfo(
        model_name=model.folder.name,
        model_path=str(model.folder.path),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        adapters={adapter.name: number for number, adapter in enumerate(model.adapters, 1)},
        max_loras=config.max_loras,
        generation=model.folder.generation_config,
        seed=config.seed,
        embeds=embeds(config.model, spec),
        pooling=spec.classifier.token
        if spec.classifier
        else model.folder.pooling() or ("mean" if spec.head is None else "last"),
        dimensions=model.folder.dimensions(),
        labels=spec.classifier.labels if spec.classifier else (),
        num_types=spec.num_types,
        max_unchunked_prompt=scheduler.max_num_batched_tokens if whole else None,
        choices=choices,
        weight_bytes=weight_bytes,
    )


def log_choices(choices: Mapping[str, Choice]) -> None:
    """Log every automatic choice of a start with its reason."""
    for name, choice in choices.items():
        _log.info("%s: %s (%s)", name, choice.value, choice.reason)


def embeds(config: ModelConfig, spec: DecoderSpec) -> bool:
    """Return whether the model gives vectors instead of tokens. Raises ConfigError where it cannot do what is asked."""
    if (spec.head is None or spec.classifier is not None) and config.task == "generate":
        kind, fix = ("an encoder", "use task=embed") if spec.classifier is None else ("a classifier", "leave task out")
        raise ConfigError(f"{config.model} is {kind}: it has no head to generate with; {fix}")
    if spec.head is None or spec.classifier is not None or config.task == "embed":
        return True
    if spec.vocab_size > MAX_COLUMNS:
        limit = f"sampling takes at most {MAX_COLUMNS:,}; it can be used with task=embed"
        raise ConfigError(f"{config.model} has {spec.vocab_size:,} tokens, and {limit}")
    return False
