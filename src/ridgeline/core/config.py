"""Frozen slices of the configuration, as the user gives them. `engine/build.py` turns every None into a value."""

from dataclasses import dataclass
from typing import Literal

from ridgeline.core.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which dtype, for how long a context. `model` is a folder, a hub id or a bundled model's name."""

    model: str
    revision: str | None = None
    dtype: Dtype = "auto"
    max_model_len: int | None = None  # tokens; None: what the model declares, less where the cache is too small

    def __post_init__(self) -> None:
        _positive("max_model_len", self.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged cache. `kv_cache_bytes` None: enough for the sequences that may run, within half of free memory."""

    block_size: int = 16
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
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
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy must be fcfs or priority, got {self.policy!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence computes at least one token a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All slices. `num_threads` None: one per core that this process may use."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _positive("num_threads", self.num_threads)
