"""Efficiencies: what share of each ceiling a kind of op reaches on this machine, fitted on steps that were timed.

    predicted = overhead + ((compute ÷ e_c)^p + (memory ÷ e_m)^p)^(1/p)

`compute` and `memory` are the limits of the roofline, so what is fitted is a share of a ceiling. Fitted by medians over
small grids; shares stay within BOUNDS, and one at a bound is a finding. Cached beside the ceilings. No torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from ridgeline.program.pricing import ElementBytes

VERSION = 2  # raised when the model of an op's time changes: fits of another version are not used
BOUNDS = (0.3, 1.05)
InputKind = Literal["f32", "bf16", "int16", "int8", "int4"]
"""What is multiplied: inputs of a kind; int4 is 8-bit inputs by 4-bit weights, which AVX2 multiplies faster."""
# 1: arithmetic and memory one after the other; 8: nearly the roofline's maximum
POWERS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
OVERHEADS = (0.0, 0.25, 0.5, 0.75, 0.9)  # shares of the shortest sample
MIN_SAMPLES = 3
DOMINANT = 2.0  # how much longer one limit is than the other where it alone decides


class OpTiming(NamedTuple):
    """One piece of a step as a backend runs it, and how long it took, in seconds.

    `ops` are the labels of the program's ops in it; none for what the program does not hold, such as sampling.
    `inputs` is the kind of arithmetic of its products, `element` what its operands take in memory.
    """

    label: str
    kind: str
    ops: tuple[str, ...]
    seconds: float
    element: ElementBytes
    inputs: InputKind


def key_of(work: OpTiming) -> str:
    """Return the name of an efficiency: the kind, what it multiplies, and the bytes of its weights, keys and values."""
    cached = f" kv{work.element.kv:.2g}" if "attention" in work.kind else ""
    return f"{work.kind} {work.inputs} w{work.element.weight:.2g}{cached}"


@dataclass(frozen=True, slots=True)
class Rest:
    """Holds the seconds of a step outside its ops: planning, sampling, taking in; some for each sequence."""

    step_s: float
    sequence_s: float

    def of(self, num_seqs: int) -> float:
        """Return the seconds around a step of `num_seqs` sequences."""
        return max(0.0, self.step_s + self.sequence_s * num_seqs)


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds one op of one kind of step: its limits and its measured time, in seconds."""

    key: str
    load: str
    compute_s: float
    memory_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Holds the fit of one kind of op. A share is None where no sample was bound that way: times there are unknown.

    Errors are |predicted - measured| ÷ measured over `num_samples` samples.
    """

    compute_share: float | None
    memory_share: float | None
    power: float
    overhead_s: float
    num_samples: int = 0
    median_error: float = 0.0
    worst_error: float = 0.0

    def predict(self, compute_s: float, memory_s: float) -> float | None:
        """Return the seconds of an op with these limits; None where nothing alike was measured."""
        compute_share, memory_share = self.compute_share, self.memory_share
        if compute_share is None and memory_share is None:
            return self.overhead_s if compute_s == memory_s == 0 else None
        if (compute_share is None and compute_s > memory_s) or (memory_share is None and memory_s > compute_s):
            return None
        times = (compute_s / (compute_share or memory_share or 1), memory_s / (memory_share or compute_share or 1))
        longest = max(times)
        if longest == 0:
            return self.overhead_s
        return self.overhead_s + longest * sum((each / longest) ** self.power for each in times) ** (1 / self.power)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Holds the efficiencies of a machine by key. `held_out_error` is the median over loads left out of the fit."""

    version: int
    num_threads: int
    measured_at: str  # ISO 8601, UTC
    efficiencies: Mapping[str, Efficiency]
    held_out_error: float | None
    rest: Rest | None = None  # None: not measured

    def predict(self, key: str, compute_s: float, memory_s: float) -> float | None:
        """Return the seconds of an op; None where its kind was not calibrated, or not with such limits."""
        known = self.efficiencies.get(key)
        return None if known is None else known.predict(compute_s, memory_s)


def fit(samples: Iterable[Sample]) -> dict[str, Efficiency]:
    """Fit every kind of op with at least MIN_SAMPLES samples, of which some have one limit far above the other."""
    by_key: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.measured_s > 0:
            by_key.setdefault(sample.key, []).append(sample)
    fitted: dict[str, Efficiency] = {}
    for key, found in by_key.items():
        if len(found) < MIN_SAMPLES:
            continue
        shortest = min(sample.measured_s for sample in found)
        candidates = (_candidate(found, power, part * shortest) for power, part in product(POWERS, OVERHEADS))
        best = min(candidates, key=lambda each: (each.median_error, each.worst_error))
        if best.median_error < math.inf:
            fitted[key] = best
    return fitted


def held_out_error(samples: Sequence[Sample]) -> float | None:
    """Return the median error over ops of loads that were left out of the fit, one at a time; None where none fits."""
    errors: list[float] = []
    for load in dict.fromkeys(sample.load for sample in samples):
        fitted = fit(sample for sample in samples if sample.load != load)
        for sample in samples:
            if sample.load == load and sample.key in fitted:
                predicted = fitted[sample.key].predict(sample.compute_s, sample.memory_s)
                if predicted is not None and sample.measured_s > 0:
                    errors.append(abs(predicted / sample.measured_s - 1))
    return median(errors) if errors else None


def _candidate(samples: Sequence[Sample], power: float, overhead_s: float) -> Efficiency:
    """Return the shares that samples with one limit far above the other have at the median, and their errors."""

    def share(limits: Sequence[tuple[float, float, float]]) -> float | None:
        bound = [(one, measured) for one, other, measured in limits if one > 0 and one >= DOMINANT * other]
        ratios = [one / (measured - overhead_s) for one, measured in bound]
        return min(max(median(ratios), BOUNDS[0]), BOUNDS[1]) if ratios else None

    compute = share([(s.compute_s, s.memory_s, s.measured_s) for s in samples])
    memory = share([(s.memory_s, s.compute_s, s.measured_s) for s in samples])
    found = Efficiency(compute, memory, power, overhead_s, len(samples), math.inf, math.inf)
    predicted = [(found.predict(s.compute_s, s.memory_s), s.measured_s) for s in samples]
    errors = [math.inf if time is None else abs(time / measured - 1) for time, measured in predicted]
    finite = [error for error in errors if error < math.inf]
    if not finite:
        return found
    return Efficiency(compute, memory, power, overhead_s, len(samples), median(finite), max(finite))


def fit_rest(seconds: Sequence[tuple[int, float]]) -> Rest | None:
    """Fit what steps of some numbers of sequences took beyond their ops, by least squares; None from too few."""
    if len({count for count, _ in seconds}) < 2:
        return None
    counts, rest_s = zip(*seconds)
    slope, step_s = np.polyfit(counts, rest_s, 1).tolist()
    return Rest(step_s, max(0.0, slope))
