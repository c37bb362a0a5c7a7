"""When requests are sent: all at once, at random times, or at the trace's; and how many may be under way.

Called by the command line and the client. A closed loop of N users is `burst` with max_concurrency N. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ridgeline.bench.workload import BenchRequest
from ridgeline.core.errors import ConfigError
from ridgeline.core.options import check, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a workload is offered to a server.

    `schedule`: "burst" (everything at 0), "poisson" (`request_rate_per_s`; a gamma process where `burstiness`
    is not 1: below 1 burstier, above 1 more even, as in vLLM) or "trace" (the workload's own times).
    `time_limit_s` ends the sending; `request_timeout_s` ends each request, so a run lasts at most their sum.
    Raises ConfigError for a value out of range or a rate without "poisson".
    """

    PANEL: ClassVar[str] = "Load"

    schedule: Literal["burst", "poisson", "trace"] = option(
        "burst", "Send all at once, at random times, or at the times of the trace."
    )
    request_rate_per_s: float | None = option(None, "poisson: requests per second.", above=0.0, flag="--rate")
    burstiness: float = option(1.0, "poisson: below 1 is burstier, above 1 more even.", above=0.0)
    max_concurrency: int | None = option(
        None, "Maximum number of requests in flight. Default: no limit.", low=1, flag="--concurrency"
    )
    time_limit_s: float = option(3600.0, "Send nothing after this many seconds.", above=0.0, flag="--time-limit-s")
    request_timeout_s: float = option(600.0, "Seconds that a request may take.", above=0.0, flag="--request-timeout-s")
    seed: int = option(0, "Seed of the random times.", low=0)

    def __post_init__(self) -> None:
        if (self.schedule == "poisson") != (self.request_rate_per_s is not None):
            raise ConfigError(
                "a request rate goes with the poisson schedule and with no other, "
                f"got {self.request_rate_per_s} with {self.schedule!r}"
            )
        check(self)

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
        import numpy as np  # --help asks for the options alone

        gaps = np.random.default_rng(self.seed).gamma(self.burstiness, 1 / (rate_per_s * self.burstiness), size=count)
        times = np.cumsum(gaps)
        return (times * (count / rate_per_s / times[-1])).tolist()
