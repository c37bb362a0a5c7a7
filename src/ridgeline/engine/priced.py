"""Look into steps as they run, one a second: what its ops took, what the machine's ceilings allow, and the prediction.

The other steps pay nothing. Nothing is priced where the ceilings were never measured. Must not import torch.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from ridgeline.backends.host import choose_threads
from ridgeline.backends.probe import find_native, this_machine
from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.log import get_logger
from ridgeline.core.step import StepPlan
from ridgeline.cost.hardware import Hardware, load, load_calibration
from ridgeline.engine.client import PricedSteps
from ridgeline.engine.journal import Journal, spans_of, timed_steps
from ridgeline.program.op import Program

if TYPE_CHECKING:
    from ridgeline.backends.base import BackendPlan
    from ridgeline.cost.steptime import StepTime
    from ridgeline.engine.executor import StepTimes

log = get_logger("engine.priced")

PRICED = ("autoregressive", "speculative")  # strategies
PERIOD_S = 1.0
RECENT = 64  # steps whose median is the machine's speed


def step_time_of(config: EngineConfig, program: Program, plan: "BackendPlan", hardware: Hardware) -> "StepTime":
    """Return the seconds of steps of `program` on this machine, with what was fitted on it."""
    from ridgeline.cost.steptime import StepTime  # not before the first token

    num_threads, _ = choose_threads(config)
    calibration = load_calibration(hardware.machine, num_threads)
    return StepTime(program, plan.pieces(), hardware.calibrated(calibration), num_threads, calibration)


class OpSeconds:
    """Observes an executor: in one step a second the clock is read at every op."""

    def __init__(self, clock: Clock) -> None:
        self.by_kind: dict[str, float] = {}
        self._clock, self._next_s = clock, -math.inf

    @property
    def times_ops(self) -> bool:
        return self._clock() >= self._next_s

    def observe(self, plan: StepPlan, times: "StepTimes") -> None:
        """Add up what the ops of a step took, where the clock was read."""
        for op in times.ops:
            self._next_s = self._clock() + PERIOD_S
            _add(self.by_kind, {op.kind: op.seconds})


class StepPrices:
    """Looks at a journal's last step but one now and then, where the machine's ceilings are known.

    What a step took is known by the one behind it, and the `depth` of the executor. Steps that a model drafts in are
    passed over: what it takes is no part of the prices.
    """

    def __init__(
        self, config: EngineConfig, program: Program, plan: "BackendPlan", journal: Journal, depth: int, clock: Clock
    ) -> None:
        self._of, self._journal, self._clock = (config, program, plan), journal, clock
        self._next_s, self._num_seen, self._depth = -math.inf, 0, depth
        self._time: StepTime | None = None
        self._sums: PricedSteps | None = None
        self._shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))  # predicted, by what bounds

    def look(self) -> PricedSteps | None:
        """Price a step, where one ended and a second has passed; return the sums. In one thread at a time."""
        now_s, num_steps = self._clock(), self._journal.steps.num_written
        if now_s < self._next_s or num_steps == self._num_seen:
            return self._sums
        self._next_s, self._num_seen = now_s + PERIOD_S, num_steps
        try:
            if self._time is None:
                if (hardware := load(this_machine(find_native(), self._of[0].backend.isa))) is None:
                    self._next_s = math.inf
                    return None
                self._time = step_time_of(*self._of, hardware)
                self._sums = PricedSteps(*self._time.ceilings_per_s())
            self._price(self._time)
        except Exception:  # whoever asks has more to tell
            log.exception("steps are not priced any more")
            self._next_s = math.inf
        return self._sums

    def _price(self, time: "StepTime") -> None:
        steps, sums = self._journal.steps.read(max(0, self._num_seen - 3))[1][:3], self._sums
        first, spans = self._journal.spans.read(int(steps["first_span"][0]))
        if sums is None or len(steps) < 3 or first != steps["first_span"][0]:
            return
        if self._of[0].speculation.drafter is not None:
            told = spans_of(steps[1], spans, int(first))
            if steps["num_rounds"][1] > 1 or (told["num_rows"] > 1).any():
                return
        _, (asked, behind, measured_s), _ = timed_steps(steps, spans, self._depth)
        (limit_s, cost), predicted_s = time.bounds(asked), time.seconds(asked, behind)
        sums.num_steps += 1
        sums.measured_s += measured_s
        sums.error_s += abs(measured_s - predicted_s)
        sums.flops += cost.flops
        kv_bytes = cost.kv_read_bytes + cost.kv_write_bytes
        _add(sums.num_bytes, {"weights": cost.weight_bytes, "kv": kv_bytes, "activations": cost.activation_bytes})
        is_fitted = time.is_rest_fitted and not time.unfitted
        _add(sums.predicted_s, {"calibrated" if is_fitted else "prior": time.mean_seconds(asked, behind)})
        _add(sums.limit_s, limit_s)
        if is_fitted and limit_s:
            self._shares[max(limit_s, key=limit_s.__getitem__)].append(predicted_s / measured_s)
            sums.speed = {bound: median(each) for bound, each in self._shares.items()}


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
