"""EngineConfig -> a running engine's parts. Every automatic choice becomes a value here, with the reason for it."""

import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ridgeline.backends.select import (
    BackendChoice,
    DtypeName,
    build_executable,
    choose_backend,
    native_support,
    pack_settings,
)
from ridgeline.backends.step import Executable
from ridgeline.backends.workspace import StepLimits
from ridgeline.cache.layout import (
    RECURRENT_BLOCKS_PER_SEQUENCE,
    CacheLayout,
    KvStateSize,
    RecurrentStateSize,
    StateSize,
    plan_layout,
)
from ridgeline.cache.manager import CacheManager
from ridgeline.core.collector import collector_paused
from ridgeline.core.config import Choice, Dtype, EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.log import get_logger
from ridgeline.core.machine import cache_folder, usable_cores
from ridgeline.decoding.diffusion import MaskedDiffusion
from ridgeline.decoding.draw import MAX_COLUMNS
from ridgeline.decoding.sampling import Sampler
from ridgeline.decoding.strategy import Autoregressive
from ridgeline.engine.embedding import Embedder
from ridgeline.engine.executor import InlineExecutor
from ridgeline.engine.intake import Intake
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.memory import available_bytes, keep_freed_memory
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.render import Renderer
from ridgeline.engine.scheduler import Scheduler
from ridgeline.program.lower import lower
from ridgeline.program.op import Program
from ridgeline.program.passes.adapt import adapted
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import GenerationDefaults, ModelFolder
from ridgeline.weights.gguf.kept import KeptWeights
from ridgeline.weights.loader import StreamedWeights, load_weights
from ridgeline.weights.lora import Adapter, ranks, read_adapters, stacked
from ridgeline.weights.packstore import PackName, PackStore
from ridgeline.weights.pooling import PoolingKind, read_pooling

log = get_logger("build")

LEAST_PACK_BYTES = 32 << 20  # of weights that are kept packed; fewer are packed again in no time
CACHE_SHARE = 0.5  # of the free memory, for a cache whose size the user leaves open
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A model ready to run: the loop that computes, the intake that makes requests, and what was chosen."""

    loop: EngineLoop
    executable: Executable
    intake: Intake
    model_name: str
    spec: DecoderSpec
    program: Program
    layout: CacheLayout
    generation: GenerationDefaults
    tokenizer: Tokenizer | None
    choices: Mapping[str, Choice]
    embedder: Embedder | None  # of a model that embeds instead of generating
    pooling: PoolingKind


@collector_paused()
def build_engine(config: EngineConfig, deliver: Callable[[list[OutputDelta]], None]) -> Engine:
    """Loads the model and puts the engine together; `deliver` receives every step's deltas in the loop's thread.

    Raises ConfigError for settings that cannot be honoured and ModelLoadError for broken model files.
    """
    folder = ModelFolder.open(config.model.model, config.model.revision)
    spec = read_spec(folder.config)
    num_threads = config.num_threads or usable_cores()
    keep_freed_memory()
    dtype, dtype_choice = _choose_dtype(config.model.dtype, folder.config)
    backend = choose_backend(config, dtype, native_support(), lower(spec).states)
    kept = _kept_weights(config, backend, folder, spec)
    # The native backend has threads of its own, and torch's would spin beside them.
    torch.set_num_threads(1 if backend.backend == "native" else num_threads)
    max_model_len, layout, cache_choices = _choose_cache(config, spec, backend, kept, num_threads)
    embeds = _embeds(config, spec)
    base = lower(spec, max_model_len, hidden=embeds)
    adapters = read_adapters(config.adapters, spec, base)
    program = adapted(base, ranks(adapters), len(adapters))
    executable = _bind(config, backend, folder, spec, base, adapters, program, layout, num_threads, kept)
    tokenizer = folder.tokenizer()
    scheduler = Scheduler(
        config.scheduler,
        CacheManager(layout, prefix_caching=config.cache.prefix_caching),
        Autoregressive() if spec.diffusion is None else MaskedDiffusion(spec.diffusion.mask_id),
        max_model_len,
        time.monotonic,
    )
    executor = InlineExecutor(executable, Sampler(), layout)
    intake = _intake(config, folder, spec, tokenizer, max_model_len, adapters)
    choices = {
        **backend.choices,
        "threads": Choice(str(num_threads), "as asked" if config.num_threads else "the cores this process may use"),
        "dtype": dtype_choice,
        **({"quantize": Choice("as stored", f"{len(kept.types)} matrices keep the file's integers")} if kept else {}),
        **cache_choices,
    }
    for name, choice in choices.items():
        log.info("%s: %s (%s)", name, choice.value, choice.reason)
    return Engine(
        loop=EngineLoop(scheduler, executor, Renderer(tokenizer), deliver),
        executable=executable,
        intake=intake,
        model_name=folder.name,
        spec=spec,
        program=program,
        layout=layout,
        generation=folder.generation_config,
        tokenizer=tokenizer,
        choices=choices,
        embedder=_embedder(config, spec, executable, layout) if embeds else None,
        pooling=read_pooling(folder.path) or ("mean" if spec.head is None else "last"),
    )


def _embeds(config: EngineConfig, spec: DecoderSpec) -> bool:
    """Whether the model gives vectors instead of tokens."""
    if spec.head is None and config.model.task == "generate":
        raise ConfigError(f"{config.model.model} is an encoder: it has no head to generate with; use task=embed")
    embeds = spec.head is None or config.model.task == "embed"
    if not embeds and spec.vocab_size > MAX_COLUMNS:
        raise ConfigError(
            f"{config.model.model} has {spec.vocab_size:,} tokens, and sampling draws from at most {MAX_COLUMNS:,}; "
            "it can be used with task=embed"
        )
    return embeds


def _embedder(config: EngineConfig, spec: DecoderSpec, executable: Executable, layout: CacheLayout) -> Embedder:
    return Embedder(executable, layout, config.scheduler.max_num_batched_tokens, whole=spec.head is None)


def _intake(
    config: EngineConfig,
    folder: ModelFolder,
    spec: DecoderSpec,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    adapters: Sequence[Adapter],
) -> Intake:
    return Intake(
        tokenizer,
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(folder.generation_config.eos_token_ids),
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        seed=config.seed,
        adapters=[adapter.name for adapter in adapters],
        whole_prompt_tokens=None if spec.diffusion is None else config.scheduler.max_num_batched_tokens,
    )


def _kept_weights(
    config: EngineConfig, backend: BackendChoice, folder: ModelFolder, spec: DecoderSpec
) -> KeptWeights | None:
    """The weights of a GGUF file that the native backend takes as they are stored, unless others were asked for."""
    if folder.gguf is None or backend.backend != "native" or config.quantize.scheme is not None:
        return None
    kept = KeptWeights(folder.gguf, spec, lower(spec))
    return kept if kept.types else None


def _bind(
    config: EngineConfig,
    backend: BackendChoice,
    folder: ModelFolder,
    spec: DecoderSpec,
    base: Program,
    adapters: Sequence[Adapter],
    program: Program,
    layout: CacheLayout,
    num_threads: int,
    kept: KeptWeights | None,
) -> Executable:
    """`program`, which is `base` with its adapters, bound to its weights.

    The native backend may find them packed by an earlier start; it reads each tensor once and keeps its own copy. The
    reference keeps what it reads.
    """

    def load() -> Mapping[str, torch.Tensor]:
        read = StreamedWeights if backend.backend == "native" else load_weights
        dtype = DTYPES[backend.dtype]
        weights = read(folder, spec, base, dtype)
        if not adapters:
            return weights
        return ChainMap(dict(stacked(adapters, dtype)), cast("dict[str, torch.Tensor]", weights))

    store = None if adapters else _open_store(config, backend, folder, program, num_threads, kept)
    executable = build_executable(backend, config, program, load, layout, num_threads, store, kept)
    if store is not None:
        store.commit()
    return executable


def _open_store(
    config: EngineConfig,
    backend: BackendChoice,
    folder: ModelFolder,
    program: Program,
    num_threads: int,
    kept: KeptWeights | None,
) -> PackStore | None:
    """Where the native backend's packed weights are kept between starts; None where they are not."""
    if backend.backend != "native" or not config.backend.pack_cache:
        return None
    if backend.weight_bytes(program, config.quantize, kept) < LEAST_PACK_BYTES:
        return None
    from ridgeline.backends.native.memory import checksum

    try:
        name = PackName.of(folder.path, folder.weight_files(), pack_settings(backend, config, program, kept))
        return PackStore(cache_folder() / "packs", name, checksum, num_threads)
    except (OSError, ConfigError) as error:
        log.warning("packed weights are not kept between starts: %s", error)
        return None


def _choose_dtype(asked: Dtype, model_config: Mapping[str, object]) -> tuple[DtypeName, Choice]:
    if asked != "auto":
        return asked, Choice(asked, "as asked")
    match model_config.get("dtype", model_config.get("torch_dtype")):
        case "float16":
            return "bfloat16", Choice("bfloat16", "the checkpoint is float16, which CPUs compute slowly")
        case "bfloat16":
            return "bfloat16", Choice("bfloat16", "the checkpoint's dtype")
        case "float32":
            return "float32", Choice("float32", "the checkpoint's dtype")
        case _:
            return "float32", Choice("float32", "config.json names no dtype")


def _choose_cache(
    config: EngineConfig, spec: DecoderSpec, backend: BackendChoice, kept: KeptWeights | None, num_threads: int
) -> tuple[int, CacheLayout, dict[str, Choice]]:
    """Context length and cache layout. An unstated context shrinks until one sequence fits; a stated one must fit."""
    declared, asked = spec.max_positions, config.model.max_model_len
    length = asked or declared
    program = lower(spec, length)
    states = [backend.state_size(state) for state in program.states]
    free_bytes = available_bytes() - backend.weight_bytes(program, config.quantize, kept)  # they come into memory later
    span = config.scheduler.max_num_batched_tokens
    while True:
        workspace = backend.workspace_bytes(program, _step_limits(config, spec, length, num_threads))
        budget, budget_choice = _choose_budget(config, states, length, free_bytes - workspace)
        try:
            layout = plan_layout(states, config.cache.block_size, budget, length, span, config.scheduler.max_num_seqs)
            break
        except ConfigError:
            if asked is not None or length <= config.cache.block_size:
                raise
            length //= 2
    if asked is not None:
        why = "as asked"
    elif length == declared:
        why = "what the model declares"
    else:
        why = f"of the declared {declared}, what one sequence can have in the cache"
    return length, layout, {"max_model_len": Choice(str(length), why), "kv_cache_bytes": budget_choice}


def _step_limits(config: EngineConfig, spec: DecoderSpec, context: int, num_threads: int) -> StepLimits:
    """What a step may have. Prompts whose own log-probabilities are asked for are not counted among rows of logits."""
    scheduler = config.scheduler
    of_all = spec.diffusion is not None or spec.head is None
    return StepLimits(
        num_tokens=scheduler.max_num_batched_tokens,
        num_rows=scheduler.max_num_batched_tokens if of_all else scheduler.max_num_seqs,
        num_seqs=scheduler.max_num_seqs,
        context=context,
        num_threads=num_threads,
        deterministic=config.backend.deterministic,
    )


def _choose_budget(
    config: EngineConfig, states: list[StateSize], max_model_len: int, free_bytes: int
) -> tuple[int, Choice]:
    cache, max_num_seqs = config.cache, config.scheduler.max_num_seqs
    if cache.kv_cache_bytes is not None:
        return cache.kv_cache_bytes, Choice(f"{cache.kv_cache_bytes:,}", "as asked")
    blocks = -(-max_model_len // cache.block_size) + 1
    per_token = sum(state.bytes_per_token for state in states if isinstance(state, KvStateSize))
    per_sequence = sum(state.num_bytes for state in states if isinstance(state, RecurrentStateSize))
    wanted = max_num_seqs * (blocks * cache.block_size * per_token + RECURRENT_BLOCKS_PER_SEQUENCE * per_sequence)
    share = max(0, int(free_bytes * CACHE_SHARE))
    if wanted <= share:
        return wanted, Choice(f"{wanted:,}", f"{max_num_seqs} sequences of {max_model_len} tokens")
    return share, Choice(f"{share:,}", f"{CACHE_SHARE:.0%} of the free memory")
