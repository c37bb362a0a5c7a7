"""SchedulerStats: what the scheduler counts, for the loop's callers."""

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.cache.manager import CacheStats
from ridgeline.core.step import DraftStats


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters; `num_preemptions` and `num_steps` since the start."""

    num_waiting: int
    num_running: int
    num_preemptions: int
    num_steps: int
    cache: CacheStats
    drafts: Mapping[str, DraftStats] | None = None  # by method; None: nothing is drafted
