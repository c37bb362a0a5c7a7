"""Efficiencies: what share of each ceiling a kind of op reaches on this machine, fitted on steps that were timed.

    predicted = overhead + t · tokens + ((compute ÷ e_c)^p + (memory ÷ e_m)^p)^(1/p)

`compute` and `memory` are the limits of the roofline, so what is fitted is a share of a ceiling. Fitted by medians over
small grids; shares stay within BOUNDS, and one at a bound is a finding. Attention and recurrences alone have a t, and
p = 1: a token takes time whatever it sees, and the parts add up. Cached beside the ceilings. No torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import product
from math import log2
from operator import mul
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.program.pricing import ElementBytes

FloatArray = npt.NDArray[np.float64]

VERSION = 8  # raised when the model of an op's time changes: fits of another version are not used
BOUNDS = (0.02, 1.05)
InputKind = Literal["f32", "bf16", "int16", "int8", "int4"]
"""What is multiplied: inputs of a kind; int4 is 8-bit inputs by 4-bit weights, which AVX2 multiplies faster."""
# 1: arithmetic and memory one after the other; 8: nearly the roofline's maximum
POWERS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
OVERHEADS = (0.0, 0.25, 0.5, 0.75, 0.9)  # shares of the shortest sample
MIN_SAMPLES = 3
BEND, BENDS = 0.5, (0.5, 2.0)  # how far apart bends are, and between what
CACHED = " cached"  # ends keys of steps all of whose bytes the cache holds
DOMINANT = 2.0  # how much longer one limit is than the other where it alone decides
MIN_REST_S, FIT_ROUNDS = 5e-6, 40
ADDED_UP = (1e-6, 1e-7, 1.7, 1.3)  # seconds and those of a token; shares of 0.6 and 0.8, where samples do not tell
RECURRENCES = ("selective_scan", "ssd", "delta_rule", "retention")
MANY = 64  # tokens of a step
COLD = 512  # tokens of a step that leaves nothing in caches
OPS_FIELDS = 2  # the last ones of a Rest


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


def keys_of(pieces: Iterable[OpTiming]) -> str:
    """Return the name of what a model's steps are made of."""
    return ", ".join(sorted({key_of(piece) for piece in pieces}))


class Behind(NamedTuple):
    """Says how many steps ago one was laid out anew, and whether sequences of the last step are gone.

    `plans`: while it runs, the next one is planned, and is not this one with each sequence a token on. `came`: how many
    of its sequences are not the last step's. `tokens`: of the step behind which it was laid out anew.
    """

    age: float = math.inf
    gone: bool = False
    plans: bool = False
    came: int = 0
    tokens: int = 0


class TimedStep(NamedTuple):
    """One step: what its ops alone are predicted to take, what else makes it longer, and how long it took."""

    ops_s: float
    num_tokens: int
    num_seqs: int
    behind: Behind
    seconds: float

    @property
    def parts(self) -> tuple[float, ...]:
        """Return what the fields of a Rest multiply."""
        age, gone, plans, came, tokens = self.behind
        anew, few_s = 0.5**age, self.ops_s * max(0.0, 1 - log2(self.num_tokens) / log2(MANY))
        around = 1, self.num_seqs, anew, anew * self.num_seqs, came, gone, plans, anew * min(tokens, COLD)
        return *around, self.ops_s - few_s, few_s


@dataclass(frozen=True, slots=True)
class Rest:
    """Holds what a step takes around its ops: planning, sampling, taking in; some for each sequence.

    A step that is not the one before with each sequence a token on takes more: it is laid out anew, and the next ones
    find plans to finish, and caches that are the colder, the more tokens were computed before. Each sequence that came
    takes more, and so does a step behind the end of some: it is not planned before these are gone; and one lacks a
    thread while the next one is planned anew. `ops` is how long
    ops take among others, by their time in profiled steps, where a step has MANY tokens, `few_ops` where it has one;
    between, it goes by the logarithm.
    """

    step_s: float
    sequence_s: float
    anew_s: float = 0.0
    anew_sequence_s: float = 0.0
    came_s: float = 0.0
    gone_s: float = 0.0
    plans_s: float = 0.0
    cold_s: float = 0.0
    ops: float = 1.0
    few_ops: float = 1.0

    def of(self, step: TimedStep) -> float:
        """Return the seconds that a step should take."""
        return sum(map(mul, astuple(self), step.parts))


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds one op of one kind of step: its limits and its measured time, in seconds."""

    key: str
    load: str
    compute_s: float
    memory_s: float
    measured_s: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Holds the fit of one kind of op. A share is None where no sample was bound that way: times there are unknown.

    `bends` has what the samples took beside that, as factors, by the binary logarithm of compute over memory: blocks of
    rows that are not full, experts that many tokens share. Errors are |predicted - measured| ÷ measured over
    `num_samples` samples.
    """

    compute_share: float | None
    memory_share: float | None
    power: float
    overhead_s: float
    num_samples: int = 0
    median_error: float = 0.0
    worst_error: float = 0.0
    bends: tuple[tuple[float, float], ...] = ()
    token_s: float = 0.0

    def predict(self, compute_s: float, memory_s: float, num_tokens: int = 0) -> float | None:
        """Return the seconds of an op of a step with these limits; None where nothing alike was measured."""
        compute_share, memory_share = self.compute_share, self.memory_share
        if compute_share is None and memory_share is None:
            return self.overhead_s if compute_s == memory_s == 0 else None
        unknown = (compute_share is None, compute_s, memory_s), (memory_share is None, memory_s, compute_s)
        if any(is_unknown and one > DOMINANT * other for is_unknown, one, other in unknown):
            return None
        times = (compute_s / (compute_share or memory_share or 1), memory_s / (memory_share or compute_share or 1))
        longest = max(times)
        if longest == 0:
            return self.overhead_s
        seconds = self.overhead_s + self.token_s * num_tokens
        seconds += longest * sum((each / longest) ** self.power for each in times) ** (1 / self.power)
        return seconds * self._bend(compute_s, memory_s) if self.bends else seconds

    def _bend(self, compute_s: float, memory_s: float) -> float:
        at = log2(compute_s / memory_s) if compute_s and memory_s else 0.0
        points, factors = zip(*self.bends)
        return float(np.interp(at, points, factors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Holds the efficiencies of a machine by key. `held_out_error` is the median over loads left out of the fit.

    Shares are those of `stream_bytes_per_s` and `ops_per_s`, the ceilings of the same minutes, where these are known.
    `rests` are those of models by `keys_of` their pieces, `rest` is the last one. At the mean steps take `mean` times
    what is predicted: what else a machine does makes some much longer, and none shorter.
    """

    version: int
    num_threads: int
    measured_at: str  # ISO 8601, UTC
    efficiencies: Mapping[str, Efficiency]
    held_out_error: float | None
    rest: Rest | None = None  # None: not measured
    rests: Mapping[str, Rest] = field(default_factory=dict[str, Rest])
    mean: float = 1.0
    stream_bytes_per_s: float | None = None
    ops_per_s: Mapping[InputKind, float] = field(default_factory=dict[InputKind, float])

    def predict(self, key: str, compute_s: float, memory_s: float, num_tokens: int = 0) -> float | None:
        """Return the seconds of an op; None where its kind was not calibrated, or not with such limits."""
        known = self.efficiencies.get(key)
        return None if known is None else known.predict(compute_s, memory_s, num_tokens)

    def rest_of(self, pieces: Iterable[OpTiming]) -> Rest | None:
        """Return what is around the ops of a model: the last one's where its own was not measured."""
        return self.rests.get(keys_of(pieces), self.rest)

    def rebased(self, newer: "Calibration") -> Mapping[str, Efficiency]:
        """Return the efficiencies as shares of the ceilings of a newer calibration."""
        if self.stream_bytes_per_s is None or newer.stream_bytes_per_s is None:
            return self.efficiencies
        memory = self.stream_bytes_per_s / newer.stream_bytes_per_s
        compute = {
            kind: per_s / newer.ops_per_s[kind] for kind, per_s in self.ops_per_s.items() if kind in newer.ops_per_s
        }
        found: dict[str, Efficiency] = {}
        for key, each in self.efficiencies.items():
            factor = next((ratio for kind, ratio in compute.items() if kind == key.split()[1]), 1.0)
            moved = 1.0 if key.endswith(CACHED) else memory
            compute_share, memory_share = each.compute_share, each.memory_share
            shares = compute_share and compute_share * factor, memory_share and memory_share * moved
            found[key] = replace(each, compute_share=shares[0], memory_share=shares[1])
        return found


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
        if "attention" in key or key.split()[0] in RECURRENCES:
            fitted[key] = _added_up(found)
            continue
        shortest = min(sample.measured_s for sample in found)
        candidates = (_candidate(found, power, part * shortest) for power, part in product(POWERS, OVERHEADS))
        best = min(candidates, key=lambda each: (each.median_error, each.worst_error))
        if best.median_error < math.inf:
            fitted[key] = _bent(best, found)
    return fitted


def held_out_error(samples: Sequence[Sample]) -> float | None:
    """Return the median error over ops of loads that were left out of the fit, one at a time; None where none fits."""
    errors: list[float] = []
    for load in dict.fromkeys(sample.load for sample in samples):
        fitted = fit(sample for sample in samples if sample.load != load)
        here = [sample for sample in samples if sample.load == load and sample.key in fitted and sample.measured_s > 0]
        errors += [_judged(fitted[sample.key], [sample]).median_error for sample in here]
    known = [error for error in errors if error < math.inf]
    return median(known) if known else None


def _candidate(samples: Sequence[Sample], power: float, overhead_s: float) -> Efficiency:
    """Return the shares that samples with one limit far above the other have at the median, and their errors."""

    def share(limits: Sequence[tuple[float, float, float]], dominant: float = DOMINANT) -> float | None:
        bound = [(one, measured) for one, other, measured in limits if one > 0 and one >= dominant * other]
        ratios = [one / (measured - overhead_s) for one, measured in bound]
        if not ratios:  # where the limits are always about as long, the longer one decides
            return share(limits, 1.0) if dominant > 1 else None
        return min(max(median(ratios), BOUNDS[0]), BOUNDS[1])

    compute = share([(s.compute_s, s.memory_s, s.measured_s) for s in samples])
    memory = share([(s.memory_s, s.compute_s, s.measured_s) for s in samples])
    return _judged(Efficiency(compute, memory, power, overhead_s), samples)


def _judged(found: Efficiency, samples: Sequence[Sample]) -> Efficiency:
    """Return a fit with its errors over samples, infinite where it knows none of them."""
    times = [(found.predict(s.compute_s, s.memory_s, s.num_tokens), s.measured_s) for s in samples]
    errors = [abs(time / measured - 1) for time, measured in times if time is not None] or [math.inf]
    return replace(found, num_samples=len(samples), median_error=median(errors), worst_error=max(errors))


def _added_up(samples: Sequence[Sample]) -> Efficiency:
    parts_NF = np.array([(1, s.num_tokens, s.compute_s, s.memory_s) for s in samples], np.float64)
    found = _least_errors(parts_NF, np.array([s.measured_s for s in samples]), np.array(ADDED_UP))
    overhead_s, token_s, *costs = found.tolist()
    compute, memory = (min(max(1 / max(each, 1e-9), BOUNDS[0]), BOUNDS[1]) for each in costs)
    return _judged(Efficiency(compute, memory, 1.0, overhead_s, token_s=token_s), samples)


def _bent(plain: Efficiency, samples: Sequence[Sample]) -> Efficiency:
    """Return a fit with what samples took more or less than it says, at the median of those that are bound alike."""
    alike: dict[int, list[tuple[float, float]]] = {}
    for sample in samples:
        predicted = plain.predict(sample.compute_s, sample.memory_s)
        if predicted and sample.compute_s and sample.memory_s:
            at = log2(sample.compute_s / sample.memory_s)
            alike.setdefault(round(at / BEND), []).append((at, sample.measured_s / predicted))
    bends = ((median(at for at, _ in each), median(factor for _, factor in each)) for each in alike.values())
    low, high = BENDS
    return _judged(replace(plain, bends=tuple(sorted((at, min(max(f, low), high)) for at, f in bends))), samples)


def fit_rest(steps: Sequence[TimedStep], prior: Rest, *, with_ops: bool = True) -> Rest:
    """Fit what steps took; `prior` is where they do not tell, and is what ops take unless `with_ops`.

    Steps of one size fit equally well with ops that take nothing, and say nothing of steps of another size then.
    """
    parts_NF, prior_F = np.array([step.parts for step in steps], np.float64), np.array(astuple(prior))
    count = len(prior_F) if with_ops else len(prior_F) - OPS_FIELDS
    given_N = parts_NF[:, count:] @ prior_F[count:]
    found_F = _least_errors(parts_NF[:, :count], np.array([step.seconds for step in steps]), prior_F[:count], given_N)
    return Rest(*found_F.tolist(), *prior_F[count:].tolist())


def _least_errors(
    parts_NF: FloatArray, measured_N: FloatArray, prior_F: FloatArray, given_N: FloatArray | float = 0.0
) -> FloatArray:
    """Return the factors of parts, beside what is given, with the least sum of |log(predicted ÷ measured)|.

    They are near the prior, and none is negative. A few times that something else made long do not count for more.
    """
    # As one step more pulls, that is off by all of it: what steps do not tell apart grows as it is in the prior.
    pull_F = 1 / np.maximum(prior_F, MIN_REST_S)
    found_F = prior_F
    for _ in range(FIT_ROUNDS):
        predicted_N = np.maximum(parts_NF @ found_F + given_N, 1e-9)
        weights_N = np.sqrt(1 / np.maximum(np.abs(np.log(predicted_N / measured_N)), 0.01) / predicted_N / measured_N)
        rows = np.vstack([parts_NF * weights_N[:, None], np.diag(pull_F)])
        wanted = np.concatenate([(measured_N - given_N) * weights_N, prior_F * pull_F])
        is_used = np.ones(len(prior_F), bool)
        while True:
            solved = np.linalg.lstsq(rows[:, is_used], wanted, rcond=None)[0]
            if (solved >= 0).all():
                break
            is_used[np.flatnonzero(is_used)[solved < 0]] = False
        found_F = np.zeros(len(prior_F))
        found_F[is_used] = solved
    return found_F
