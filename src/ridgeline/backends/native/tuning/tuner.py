"""Chooses the variants of a kind of matrices by measuring them on this machine. Called once per kind, by choose.py.

On a shared machine any one reading may be half of the next. So variants run in rounds, each beside the default of the
same round, the default itself twice: what the two differ by is noise, and a variant has to win by more, repeatedly.
The default is what remains when in doubt.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import ceil, exp, log
from statistics import median

from ridgeline import _native
from ridgeline.backends.native.memory import PANEL
from ridgeline.backends.native.settings import MatrixFormat, kind_name
from ridgeline.backends.native.tuning.workload import Bench, Run, Workload, empty_matrix
from ridgeline.core.machine import memory_bytes
from ridgeline.cost.hardware import KernelTuning, TunedChoice

# In the order in which they are decided: what the product is made of, its blocks, then how weights are fetched.
WORKLOADS: Mapping[str, Workload] = {
    "product": Workload(num_rows=128, cached=True),
    "block": Workload(num_rows=128, cached=True),
    "stream": Workload(num_rows=1, cached=False),
    "fetch": Workload(num_rows=1, cached=False),
    "turns": Workload(num_rows=16, cached=False),
}
SHARES: Mapping[str, float] = {"product": 0.1, "block": 0.1, "stream": 0.5, "fetch": 0.1, "turns": 0.15}
"""Shares of the time for one kind; the rest is for taking memory and for variants that are slower than the default."""

OVERRUN = 1.25  # of the time, where something else keeps the machine busy
NUM_ROUNDS = 7  # that count; one more before them warms up
TRIES = 3  # of which a round takes the fastest: a moment of another process falls into one of them
MIN_SCORE = 1.03  # times as fast as the default, at the median
MIN_NOISES = 2.0  # by which a score is above 1
MIN_WON = 5 / 7  # of the rounds
TIE = 0.01  # of the best score, within which the earlier variant is taken
READ, AGAIN = "read", "again"  # what runs beside the variants
MIN_READ_BYTES = 8 << 20
MIN_BUFFER_BYTES, MAX_BUFFER_BYTES, BUFFER_BYTES_PER_THREAD = 256 << 20, 1 << 30, 128 << 20


Round = Mapping[str, float]
"""Seconds of each variant, the default among them, one after the other within a moment."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The variant to take; how many times as fast as the default it was, and in how many rounds it was faster."""

    variant: str
    score: float
    rounds_won: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds what tuning takes: seconds for all kinds together, bytes of memory meanwhile, rounds of each choice."""

    seconds: float
    buffer_bytes: int
    num_rounds: int = NUM_ROUNDS

    @classmethod
    def of(cls, num_threads: int) -> "Effort":
        """Return two seconds' work on memory that no core's share of a cache holds, within an eighth of all there is.

        The margin within the two seconds is for a machine that is busy.
        """
        wanted = min(max(MIN_BUFFER_BYTES, num_threads * BUFFER_BYTES_PER_THREAD), MAX_BUFFER_BYTES)
        return cls(1.5, min(wanted, memory_bytes() // 8))


class Tuner:
    """Measures kinds of matrices at one level, with as many threads as a step has."""

    def __init__(self, level: str, num_threads: int, effort: Effort, kernels: str, product: str | None = None) -> None:
        """Take the memory. `kernels` names the build that is measured; a `product` that is given was decided before."""
        self._product = product
        self._level, self._num_threads, self._effort, self._kernels = level, num_threads, effort, kernels
        self._deadline_s = time.perf_counter() + OVERRUN * effort.seconds
        self._bench = Bench(level, num_threads, effort.buffer_bytes)
        num_bytes = effort.buffer_bytes // 2 // 64 * 64
        read = self._bench.read_run(num_bytes)
        read()
        self._read_bytes_per_s = num_bytes / min(read() for _ in range(2))

    def tune(self, form: MatrixFormat, defaults: Mapping[str, str], seconds: float) -> KernelTuning:
        """Decide each choice of `defaults` that has several variants, within about so many seconds."""
        variants, choices = dict(defaults), list[TunedChoice]()
        reads, panel = list[float](), empty_matrix(form, PANEL, PANEL)
        for choice in WORKLOADS:
            names = [name for each, name in _native.variants_of(self._level, panel) if each == choice]
            is_decided = choice == "product" and self._product is not None
            if choice not in defaults or len(names) < 2 or is_decided:
                continue
            num_runs = TRIES * (len(names) + 5) * (self._effort.num_rounds + 1)
            decision, read = self._decide(form, variants, choice, names, SHARES[choice] * seconds / num_runs)
            choices.append(TunedChoice(choice=choice, default=defaults[choice], **asdict(decision)))
            variants[choice] = decision.variant
            reads += read
        return KernelTuning(
            kind=kind_name(form),
            num_threads=self._num_threads,
            kernels=self._kernels,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            read_bytes_per_s=median(reads) if reads else self._read_bytes_per_s,
            choices=tuple(choices),
        )

    def _decide(
        self, form: MatrixFormat, variants: Mapping[str, str], choice: str, names: Sequence[str], run_s: float
    ) -> tuple[Decision, list[float]]:
        """Decide one choice; return with it the bytes per second of each round's read. A winner has to win twice."""
        default, workload = variants[choice], WORKLOADS[choice]
        read_bytes = max(int(run_s * self._read_bytes_per_s), MIN_READ_BYTES)
        read_bytes = min(read_bytes, self._effort.buffer_bytes // 2) // 64 * 64
        num_bytes = self._work(form, variants, workload, run_s) if workload.num_rows > 1 else read_bytes
        read = self._bench.read_run(read_bytes)
        runs = {name: self._bench.product_run(form, {**variants, choice: name}, workload, num_bytes) for name in names}
        again = self._bench.product_run(form, variants, workload, num_bytes)
        rounds = self._rounds({READ: read, **runs, AGAIN: again})
        reads = [read_bytes / each[READ] for each in rounds]
        decision = _decided(default, rounds)
        if decision.variant != default:
            both = {name: runs[name] for name in names if name in (default, decision.variant)}
            decision = _decided(default, self._rounds({**both, AGAIN: again}))
        return decision, reads

    def _rounds(self, runs: Mapping[str, Run]) -> Sequence[Round]:
        """Return the fastest of a few tries of everything, in each round but the first, which warms up.

        Where the time is over there are none: nothing was found that replaces a default.
        """
        rounds: list[Round] = []
        while len(rounds) <= self._effort.num_rounds:
            if time.perf_counter() > self._deadline_s:
                return []
            rounds.append({name: min(run() for _ in range(TRIES)) for name, run in runs.items()})
        return rounds[1:]

    def _work(self, form: MatrixFormat, variants: Mapping[str, str], workload: Workload, run_s: float) -> int:
        """Return the bytes of weights whose products take about `run_s`."""
        probe_bytes = 1 << 20 if workload.cached else 8 << 20
        run = self._bench.product_run(form, variants, workload, probe_bytes)
        run()
        return int(probe_bytes * run_s / min(run() for _ in range(2)))


def tune_all(
    level: str,
    num_threads: int,
    kinds: Mapping[MatrixFormat, Mapping[str, str]],
    effort: Effort,
    kernels: str,
    product: str | None = None,
) -> tuple[list[KernelTuning], float]:
    """Measure kinds, given with their defaults; return what was found and the seconds that it took.

    A `product` that is given was decided before, and is not decided again.
    """
    started = time.perf_counter()
    tuner = Tuner(level, num_threads, effort, kernels, product)
    left_s = max(effort.seconds - (time.perf_counter() - started), effort.seconds / 4)
    found = [tuner.tune(form, defaults, left_s / len(kinds)) for form, defaults in kinds.items()]
    # What a busy machine left undone has its turn at the next start.
    done = [each for each in found if all(choice.num_rounds for choice in each.choices)]
    return done, time.perf_counter() - started


def _decided(default: str, rounds: Sequence[Round]) -> Decision:
    if not rounds:
        return Decision(default, 1.0, 0, 0)
    variants = [{name: seconds for name, seconds in each.items() if name not in (READ, AGAIN)} for each in rounds]
    return decide(default, variants, noise_of(default, AGAIN, rounds))


def decide(default: str, rounds: Sequence[Round], noise: float = 0.0) -> Decision:
    """Return the fastest variant that beats `default` beyond doubt, else the default with a score of 1.

    `noise` is what `noise_of` finds in the same rounds. Among equally fast variants, the first in the order of the
    rounds' keys is taken: the one that fetches least.
    """
    found: list[Decision] = []
    for variant in (name for name in rounds[0] if name != default) if rounds else ():
        ratios = [seconds[default] / seconds[variant] for seconds in rounds]
        found.append(Decision(variant, median(ratios), sum(ratio > 1 for ratio in ratios), len(ratios)))
    min_score, min_won = max(MIN_SCORE, exp(MIN_NOISES * noise)), ceil(MIN_WON * len(rounds))
    better = [each for each in found if each.score >= min_score and each.rounds_won >= min_won]
    if not better:
        return Decision(default, 1.0, 0, len(rounds))
    best = max(each.score for each in better)
    return next(each for each in better if each.score >= best * (1 - TIE))


def noise_of(first: str, again: str, rounds: Sequence[Round]) -> float:
    """Return how far two runs of the same work in one round are apart, at the median, as a logarithm."""
    return median(abs(log(seconds[first] / seconds[again])) for seconds in rounds)
