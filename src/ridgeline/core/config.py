"""Frozen slices of the configuration, as the user gives them. `engine/build.py` gives every None and auto a value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ridgeline.core.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]
KvDtype = Literal["auto", "float32", "bfloat16", "int8"]
Task = Literal["auto", "generate", "embed"]
QuantizationScheme = Literal["int8", "int4"]
InputBits = Literal["int16", "int8"]
BackendName = Literal["auto", "native", "reference"]

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 128
MOST_THREADS = 4096  # of the native backend's pool


@dataclass(frozen=True, slots=True)
class Choice:
    """A resolved setting and the sentence that says why it has this value."""

    value: str
    reason: str


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")


def _one_of(name: str, value: str, literal: object) -> None:
    """Refuses what a type checker would have, from callers that have none."""
    if value not in get_args(literal):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(literal))}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which dtype, for how long a context.

    `model` is a folder, a .gguf file, a hub id or a bundled model's name. `task` auto: a model with a head generates,
    an encoder embeds.
    """

    model: str
    revision: str | None = None
    dtype: Dtype = "auto"
    task: Task = "auto"
    max_model_len: int | None = None  # tokens; None: what the model declares, less where the cache is too small

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, Dtype)
        _one_of("task", self.task, Task)
        _positive("max_model_len", self.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged cache. `kv_cache_bytes` None: enough for the sequences that may run, within half of free memory.

    `kv_dtype` is that of keys and values; int8 has a scale per token and head.
    """

    block_size: int = 32  # scattered blocks are read faster when larger, prefixes shared more finely when smaller
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    kv_dtype: KvDtype = "auto"

    def __post_init__(self) -> None:
        _one_of("kv_dtype", self.kv_dtype, KvDtype)
        _positive("block_size", self.block_size)
        _positive("kv_cache_bytes", self.kv_cache_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many sequences run at once, how many tokens a step computes, and in which order requests are served."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    policy: SchedulingPolicy = "fcfs"
    max_queued_requests: int = 1024

    def __post_init__(self) -> None:
        _positive("max_num_seqs", self.max_num_seqs)
        _positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _positive("max_queued_requests", self.max_queued_requests)
        _one_of("policy", self.policy, SchedulingPolicy)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence computes at least one token a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """Weights rounded to integers while they are loaded. `scheme` None: they stay as they are.

    `group_size` weights of an output share a scale, and a zero point with `zero_points`: int4 only. `inputs` is what a
    layer's inputs are rounded to while it is computed. `embeddings`: the token table and the head are quantized too.
    """

    scheme: QuantizationScheme | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    zero_points: bool = False
    inputs: InputBits = "int16"
    embeddings: bool = True

    def __post_init__(self) -> None:
        _one_of("quantize_inputs", self.inputs, InputBits)
        options = (self.group_size, self.zero_points, self.inputs, self.embeddings)
        if self.scheme is None and options != (DEFAULT_GROUP_SIZE, False, "int16", True):
            raise ConfigError("options of quantization were given without a scheme; add quantize=int8 or int4")
        if self.scheme is None:
            return
        _one_of("quantize", self.scheme, QuantizationScheme)
        if self.group_size not in GROUP_SIZES:
            allowed = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"quantize_group_size must be one of {allowed}, got {self.group_size}")
        if self.scheme == "int8" and (self.zero_points or self.group_size != DEFAULT_GROUP_SIZE):
            raise ConfigError("int8 has one scale per output: group size and zero points are options of int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """What computes. `isa` None: the widest level that this machine runs; `pack_cache`: keep packed weights on disk.

    With `deterministic` a request's tokens and log-probabilities do not depend on what else runs.
    """

    backend: BackendName = "auto"
    isa: str | None = None
    deterministic: bool = False
    pack_cache: bool = True

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BackendName)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All slices. `num_threads` None: one per core that this process may use; `adapters`: folders of LoRA by name."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    backend: BackendConfig = BackendConfig()
    num_threads: int | None = None
    seed: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if any(not name for name in self.adapters):
            raise ConfigError("an adapter needs a name: name=folder")
        _positive("num_threads", self.num_threads)
        if self.num_threads is not None and self.num_threads > MOST_THREADS:
            raise ConfigError(f"num_threads is at most {MOST_THREADS:,}, got {self.num_threads:,}")
