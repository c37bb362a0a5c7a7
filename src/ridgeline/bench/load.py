"""When requests are sent: all at once, at random times, or at the trace's; and how many may be under way.

Called by the command line and the client. A closed loop of N users is `burst` with max_concurrency N. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ridgeline.bench.workload import BenchRequest, require
from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a workload is offered to a server.

    `schedule`: "burst" (everything at 0), "poisson" (`request_rate_per_s`; a gamma process where `burstiness`
    is not 1: below 1 burstier, above 1 more even, as in vLLM) or "trace" (the workload's own times).
    `time_limit_s` ends the sending; `request_timeout_s` ends each request, so a run lasts at most their sum.
    Raises ConfigError for a value out of range or a rate without "poisson".
    """

    schedule: Literal["burst", "poisson", "trace"] = "burst"
    request_rate_per_s: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    time_limit_s: float = 3600.0
    request_timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.schedule == "poisson") != (self.request_rate_per_s is not None):
            raise ConfigError(
                "a request rate goes with the poisson schedule and with no other, "
                f"got {self.request_rate_per_s} with {self.schedule!r}"
            )
        for name, value in (
            ("request_rate_per_s", self.request_rate_per_s),
            ("burstiness", self.burstiness),
            ("time_limit_s", self.time_limit_s),
            ("request_timeout_s", self.request_timeout_s),
        ):
            require(value is None or (0 < value < math.inf), name, value, "a finite number above 0")
        require(
            self.max_concurrency is None or self.max_concurrency >= 1,
            "max_concurrency",
            self.max_concurrency,
            "1 or more",
        )
        require(self.seed >= 0, "seed", self.seed, "0 or more")

    def schedule_requests(self, requests: Sequence[BenchRequest]) -> list[BenchRequest]:
        """Return the same requests with their arrival times set, in order of arrival. Raises ConfigError for none."""
        if not requests:
            raise ConfigError("the workload holds no requests")
        if self.schedule == "trace":
            return sorted(requests, key=lambda request: request.arrival_s)
        times = (
            [0.0] * len(requests)
            if self.request_rate_per_s is None
            else self._random_times(len(requests), self.request_rate_per_s)
        )
        return [replace(request, arrival_s=time) for request, time in zip(requests, times)]

    def _random_times(self, count: int, rate_per_s: float) -> list[float]:
        """Sum gamma gaps, stretched so that the last falls at count/rate: seeds differ in shape, not in load."""
        gaps = np.random.default_rng(self.seed).gamma(self.burstiness, 1 / (rate_per_s * self.burstiness), size=count)
        times = np.cumsum(gaps)
        return (times * (count / rate_per_s / times[-1])).tolist()
