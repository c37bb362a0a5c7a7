"""Count over the records of an engine's journal, a few times a second and at every scrape: the loop pays nothing."""

from collections import Counter, defaultdict, deque

import numpy as np
import numpy.typing as npt

from ridgeline.core.host import HostSample
from ridgeline.core.log import get_logger
from ridgeline.engine.client import PricedSteps
from ridgeline.engine.journal import KINDS, WAIT_REASONS, Journal, Records
from ridgeline.server.metric_names import BUCKETS, METRICS

log = get_logger("server")

DRIFT_S, MAX_DRIFT = 600.0, 0.15


class Distribution:
    """Counts values between the bounds of a histogram."""

    def __init__(self, name: str) -> None:
        self.sum = 0.0
        self._bounds = BUCKETS[METRICS[name].buckets]
        self._counts = np.zeros(len(self._bounds) + 1, np.int64)

    def add(self, values: npt.NDArray[np.generic]) -> None:
        """Count values."""
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Return how many values there were up to each bound."""
        return [(str(b), float(n)) for b, n in zip((*self._bounds, "+Inf"), self._counts.cumsum(), strict=True)]


class Drift:
    """Compares the measured with the predicted time of the steps that were priced in the last ten minutes."""

    def __init__(self) -> None:
        self.ratio: float | None = None
        self._seen: deque[tuple[float, float, float]] = deque()  # when, measured and predicted, summed
        self._is_told = False

    def is_due(self, now_s: float) -> bool:
        """Tell whether a second has passed."""
        return not self._seen or now_s >= self._seen[-1][0] + 1

    def follow(self, now_s: float, priced: PricedSteps | None) -> None:
        """Take in the sums of now; a line in the log says when a plan does not hold any more."""
        if priced is None:
            return
        predicted_s = sum(priced.predicted_s.values())
        if self._seen and predicted_s < self._seen[-1][2]:  # of another process
            self._seen.clear()
        self._seen.append((now_s, priced.measured_s, predicted_s))
        while len(self._seen) > 1 and now_s >= self._seen[1][0] + DRIFT_S:
            self._seen.popleft()
        began_s, *before = self._seen[0]
        if predicted_s > before[1]:
            self.ratio = (priced.measured_s - before[0]) / (predicted_s - before[1])
        is_off = self.ratio is not None and abs(self.ratio - 1) > MAX_DRIFT and now_s >= began_s + DRIFT_S
        if is_off and not self._is_told:
            log.warning("steps take %.2f times the planned time for ten minutes: ridgeline doctor says why", self.ratio)
        self._is_told = is_off


class StepCounts:
    """Sums since the start, over the journals of all processes that the engine has had."""

    def __init__(self) -> None:
        self.seconds = Distribution("step_duration_seconds")
        self.tokens, self.sequences = Distribution("step_tokens"), Distribution("step_sequences")
        self.parts_s: dict[str, float] = defaultdict(float)
        self.waits_s: dict[str, float] = defaultdict(float)  # by what the queue's head waited for
        self.misses: Counter[str] = Counter()  # by why the prefix cache served no more
        self.head_waits = ""  # what the queue's head waits for since the last step
        self.num_copies = self.num_lost = 0
        self.host: HostSample | None = None
        self._journal: Journal | None = None
        self._next: dict[str, int] = {}

    def follow(self, journal: Journal) -> None:
        """Take in what is new; another journal than before is that of an engine which was started again."""
        if journal is not self._journal:
            self._journal, self._next = journal, {"steps": 0, "decisions": 0}
        if len(steps := self._new(journal, "steps")):
            self._take(steps)
            for host in journal.host.read(journal.host.num_written - 1)[1]:
                self.host = HostSample(*(float(host[name]) for name in HostSample._fields))
        decisions = self._new(journal, "decisions")
        admitted = decisions[decisions["kind"] == KINDS.index("admitted")]
        self.misses.update(journal.cache_reasons[code] for code in admitted["reason"].tolist())

    def _new(self, journal: Journal, ring: str) -> Records:
        first, records = journal.rings[ring].read(self._next[ring])
        self.num_lost += first - self._next[ring]
        self._next[ring] = first + len(records)
        return records

    def _take(self, steps: Records) -> None:
        names = ("plan", "batch", "sample", "commit", "render")
        known = {name: steps[f"{name}_s"][~np.isnan(steps[f"{name}_s"])] for name in names}
        parts_s = {name: float(seconds.sum()) for name, seconds in known.items() if len(seconds)}
        parts_s["model"] = float(steps["run_s"].sum()) - parts_s.get("batch", 0.0) - parts_s.get("sample", 0.0)
        for part, part_s in parts_s.items():
            self.parts_s[part] += part_s
        seconds = steps["plan_s"] + steps["run_s"] + steps["commit_s"] + steps["render_s"]
        self.seconds.add(seconds)
        self.tokens.add(steps["num_tokens"])
        self.sequences.add(steps["num_spans"])
        self.num_copies += int(steps["num_copies"].sum())
        self.head_waits = WAIT_REASONS[steps["head_waits"][-1]]
        for code in set(steps["head_waits"].tolist()) - {0}:
            self.waits_s[WAIT_REASONS[code]] += float(seconds[steps["head_waits"] == code].sum())
