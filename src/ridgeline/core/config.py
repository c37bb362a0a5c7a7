"""Frozen slices of the configuration, as the user gives them. `engine/build.py` gives every None and auto a value.

Each option is declared here and nowhere else (`core/options.py`): `LLM(...)` and the commands read this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from ridgeline.core.errors import ConfigError
from ridgeline.core.options import check, option, suggestion, table
from ridgeline.core.speculation import DraftSampleMethod, RejectionSampleMethod, SpeculationConfig
from ridgeline.core.speculative_config import speculation_options

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]
KvDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8", "int4"]
Task = Literal["auto", "generate", "embed"]
InputBits = Literal["auto", "int16", "int8"]

SCHEMES = Path(__file__).parents[1] / "quant" / "schemes"  # a file for each quantization scheme, named as it
MAX_THREADS = 4096  # of the native backend's pool
MAX_LORAS = 1024
INTERACTIVE_SPECULATE = "auto"
SERVED_ITL_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A resolved setting and the sentence that says why it has this value."""

    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Says what to load, and for what context; `model`: a folder, a .gguf file, a hub id, a bundled model's name."""

    PANEL: ClassVar[str] = "Model"

    model: str
    revision: str | None = option(None, "Branch, tag or commit of a model on the hub. Default: the main branch.")
    dtype: Dtype = option("auto", "Data type of weights and activations; auto takes the checkpoint's.")
    task: Task = option("auto", "Generate text or embed it; auto generates with a model that has a head, else embeds.")
    max_model_len: int | None = option(
        None, "Maximum context in tokens. Default: the model's.", low=1, short="-c", aka="ctx_size n_ctx max_seq_len"
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """Weights quantized while they are loaded. `scheme` None: they stay as they are."""

    PANEL: ClassVar[str] = "Quantization"
    PREFIX: ClassVar[str] = "quantize_"

    scheme: str | None = option(
        None,
        "Quantize the weights while they are loaded: int8, int4, mxfp4, nvfp4, nf4 or fp8.",
        name="quantize",
        metavar="SCHEME",
        aka="quantization",
    )
    group_size: int | None = option(None, "int4: weights that share a scale, 32, 64 or 128. Default: 128.", low=1)
    zero_points: bool = option(False, "int4: store a zero point beside each scale.")
    inputs: InputBits = option(
        "auto", "Type of quantized layers' inputs; auto takes int8 (W8A8, W4A8), int16 is slower and more exact."
    )
    embeddings: bool = option(True, "Quantize the embedding and the LM head too.")

    def __post_init__(self) -> None:
        check(self)
        options = (self.group_size, self.zero_points, self.embeddings)  # a checkpoint's own integers have inputs too
        if self.scheme is None and options != (None, False, True):
            raise ConfigError("options of quantization were given without a scheme; add quantize=int8 or int4")
        if self.scheme is not None and self.scheme not in scheme_names():
            raise ConfigError(f"quantize must be one of {', '.join(scheme_names())}, got {self.scheme!r}")


def scheme_names() -> list[str]:
    """Return the quantization schemes. What options each of them has it knows itself, when it is loaded."""
    return sorted(path.stem for path in SCHEMES.glob("[a-z]*.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Options that size the paged KV cache."""

    PANEL: ClassVar[str] = "KV cache"

    block_size: int = option(32, "Tokens per block, a power of two: larger is faster, smaller shares more.", low=1)
    kv_cache_bytes: int | None = option(
        None,
        "Size of the KV cache in bytes. Default: room for all sequences, within half of the free memory.",
        low=1,
        aka="kv_cache_memory_bytes gpu_memory_utilization",
    )
    prefix_caching: bool = option(
        True, "Reuse the KV cache of prompts that begin alike.", name="enable_prefix_caching", flag="--prefix-caching"
    )
    kv_dtype: KvDtype = option(
        "auto",
        "Data type of the KV cache; auto takes the model's, int8 and fp8 halve it, int4 leaves 27 %.",
        aka="kv_cache_dtype cache_type_k cache_type_v",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many sequences run at once, how many tokens a step computes, and in which order requests are served."""

    PANEL: ClassVar[str] = "Scheduling"

    max_num_seqs: int = option(64, "Maximum number of sequences that run at once.", low=1, aka="parallel")
    max_num_batched_tokens: int = option(
        512, "Maximum number of tokens per step; longer prompts are chunked.", low=1, aka="batch_size ubatch_size"
    )
    policy: SchedulingPolicy = option(
        "fcfs", "Serve first come, first served, or by each request's priority, lower first.", name="scheduling_policy"
    )
    max_itl_s: float | None = option(
        None,
        "Bound on the seconds between tokens of running sequences: prompts beside them are cut in chunks that keep it. "
        "Default: none, for the highest throughput.",
        above=0,
        high=60,
        flag="--max-itl-s",
    )
    max_itl_ratio: float | None = option(
        None,
        "The same bound as a multiple of what a step takes without prompts, as measured; 0: none. "
        "Default: 3 in a server, none elsewhere.",
        low=0,
        high=1000,
    )

    def __post_init__(self) -> None:
        check(self)
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens < seqs:
            why = "every running sequence computes at least one token a step"
            raise ConfigError(f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}): {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """Options that say what computes, and how."""

    PANEL: ClassVar[str] = "Execution"

    backend: str = option("auto", "Implementation to use; auto takes native where it runs.", aka="device")
    isa: str | None = option(None, "Instruction set of the native backend, such as avx2. Default: the widest.")
    deterministic: bool = option(False, "Give a request the same tokens whatever else runs; slower.")
    tuning: str = option(
        "auto",
        "Kernel variants: auto measures at a machine's first start, default does not; or a file or CHOICE=VARIANT,...",
        metavar="HOW",
    )
    pack_cache: bool = option(True, "Keep packed weights on disk, below ~/.cache, so that the next start is faster.")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options that an engine has."""

    PANEL: ClassVar[str] = "Execution"

    model: ModelConfig
    quantize: QuantizeConfig = QuantizeConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    backend: BackendConfig = BackendConfig()
    num_threads: int | None = option(
        None, "Compute threads. Default: one per usable core.", low=1, high=MAX_THREADS, short="-t", aka="threads"
    )
    seed: int = option(0, "Seed from which requests without a seed of their own get theirs.", low=0)
    journal: str | None = option(
        None, "Record what the engine does, without tokens or text, for simulate --replay and doctor.", metavar="FILE"
    )
    adapters: Mapping[str, str] = option(
        factory=dict[str, str],
        help="A LoRA adapter in PEFT's format; may be given several times.",
        flag="--lora",
        metavar="NAME=FOLDER",
        aka="lora_modules enable_lora",
    )
    max_loras: int = option(
        0, "Adapters that a server may have, loaded as it runs. Default: those of --lora.", low=0, high=MAX_LORAS
    )
    max_lora_rank: int = option(16, "Rank of adapters that are loaded as a server runs.", low=1, high=1024)
    choices: Mapping[str, Choice] = field(default_factory=dict[str, Choice])  # options that were chosen, not given

    def __post_init__(self) -> None:
        check(self)
        if (drafting := self.speculation.draft_quantize) not in (known := ["auto", "none", *scheme_names()]):
            raise ConfigError(f"draft_quantize must be one of {', '.join(known)}, got {drafting!r}")
        if any(not name for name in self.adapters):
            raise ConfigError("an adapter needs a name: name=folder")
        if len(self.adapters) > (most := self.max_loras or MAX_LORAS):
            raise ConfigError(f"{len(self.adapters)} adapters are given, and max_loras is {most}; raise it")

    def served(self) -> "EngineConfig":
        """Return it with the defaults of a server, whose clients wait for every token."""
        ratio = SERVED_ITL_RATIO if self.scheduler.max_itl_ratio is None else self.scheduler.max_itl_ratio
        return replace(self, scheduler=replace(self.scheduler, max_itl_ratio=ratio))

    def drafting(self) -> "EngineConfig":
        """Return it with the default of one who waits for every token: drafts, as far as they pay."""
        speculate = INTERACTIVE_SPECULATE if self.speculation.speculate is None else self.speculation.speculate
        return replace(self, speculation=replace(self.speculation, speculate=speculate))

    @classmethod
    def of(cls, model: str, **options: object) -> "EngineConfig":
        """Build the configuration from options by their keywords, those of EngineOptions.

        Raises ConfigError for an unknown option, naming the closest one, and for values that cannot be honoured.
        """
        rows = {row.name: row for row in table(cls)}
        if (given := options.pop("speculative_config", None)) is not None:
            translated = speculation_options(given)  # pyright: ignore[reportArgumentType]
            if twice := [name for name in translated if name in options]:
                raise ConfigError(f"{twice[0]} was given twice, by itself and in speculative_config; give one")
            options |= translated
        parts: dict[str, dict[str, Any]] = {"model": {"model": model}}
        for name, value in options.items():
            if name not in rows:
                close = suggestion(name, rows.values())
                hint = f"; did you mean {close.name}?" if close else f"; there is {', '.join(sorted(rows))}"
                raise ConfigError(f"unknown option {name}{hint}")
            parts.setdefault(rows[name].part or "", {})[rows[name].field] = value
        own = parts.pop("", {})
        slices: dict[str, Any] = {item.name: item.type for item in fields(cls)}
        return cls(**{part: slices[part](**given) for part, given in parts.items()}, **own)


class EngineOptions(TypedDict, total=False):
    """Names the keywords of `LLM`, for type checkers: one for each option of EngineConfig."""

    revision: str | None
    dtype: Dtype
    task: Task
    max_model_len: int | None
    block_size: int
    kv_cache_bytes: int | None
    enable_prefix_caching: bool
    kv_dtype: KvDtype
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: SchedulingPolicy
    max_itl_s: float | None
    max_itl_ratio: float | None
    quantize: str | None
    quantize_group_size: int | None
    quantize_zero_points: bool
    quantize_inputs: InputBits
    quantize_embeddings: bool
    speculate: str | None
    num_speculative_tokens: int | None
    adaptive_speculation: bool
    draft_sample_method: DraftSampleMethod
    rejection_sample_method: RejectionSampleMethod
    draft_quantize: str
    prompt_lookup_min: int
    prompt_lookup_max: int
    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float
    lookahead_window: int
    lookahead_ngram: int
    lookahead_guesses: int
    speculative_config: str | Mapping[str, object] | None
    backend: str
    isa: str | None
    deterministic: bool
    tuning: str
    pack_cache: bool
    num_threads: int | None
    seed: int
    journal: str | None
    adapters: Mapping[str, str]
    max_loras: int
    max_lora_rank: int
