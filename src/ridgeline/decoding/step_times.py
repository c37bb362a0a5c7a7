"""Learn what steps with drafts take, as times those without, on the machine that runs. Called by `draft_control.py`."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

FIRST_TRIED = 4  # drafted tokens of a step, at most, where nothing is known
PRIOR_SLOPE = 1 / 64  # growth of a step a token where nothing is known: optimistic, so that it is tried
TRIALS, PLAIN_TRIALS = 4, 4  # steps of a shape, the first of which are slow, before it is known; windows without drafts
PLAIN_WINDOWS = 5  # without drafts, of whose times the median counts
MEMORY_STEPS, PLAIN_MEMORY_STEPS = 64, 16  # over which a shape is learnt; few are seen without drafts
LEVEL_GAIN, MAX_CHANGE = 0.3, 0.25  # of a step's change that the level follows, and that is believed at most
MAX_GAIN = 0.25  # of a call of rounds that a shape follows at most, however many these are: others disturb all alike
PACES, MAX_OUTSIDE = 3, 3.0  # steps without drafts amid rounds, of whose times the median counts; times that, at most
MANY, MANY_ALIKE = 16, 4  # sequences from which steps without drafts of that many numbers of them are learnt as one
MAX_RATIO = 8.0  # of one step to one without drafts: what is longer was disturbed
BETWEEN = -1  # instead of drafted tokens: none, but drafts were asked for, or the step before had some


@dataclass(slots=True)
class _Shape:
    """The steps of one number of sequences and of drafted tokens: what they take, as a share of another time.

    What `is_tried` begins with the best that was seen: what looks too long for good is never seen again.
    """

    is_tried: bool = True
    trials: int = TRIALS
    memory_steps: int = MEMORY_STEPS
    num_steps: int = 0
    share: float = 1.0
    first: list[float] = field(default_factory=list[float])

    @property
    def is_known(self) -> bool:
        return self.num_steps >= self.trials

    def observe(self, share: float, count: int = 1, max_change: float = MAX_CHANGE) -> float:
        """Take in a step of `count` rounds; return by how much it was longer than usual, 0 where that is not known."""
        self.num_steps += count
        if len(self.first) < self.trials:  # of several rounds the first one is known, and may have been disturbed
            self.first.append(share)
            self.share = min(self.first) if self.is_tried else median(self.first[-3:])
            return 0.0
        change = min(max(share / self.share - 1, -max_change), max_change)
        self.share *= 1 + change * min(count / min(self.num_steps, self.memory_steps), MAX_GAIN)
        return change


_Batch = tuple[int, bool]  # digits of the number of sequences, and whether a model computes the drafts


class StepTimes:
    """Learns what steps without drafts take, as shares of a level that follows the machine's moods, and how many times
    longer drafts make them: alike for numbers of sequences of as many binary digits, and apart where a model computes
    them.
    """

    def __init__(self) -> None:
        self._level_s = 0.0
        self._plain: dict[int, _Shape] = {}  # by sequences, as those below
        self._recent_s: dict[int, deque[float]] = {}
        self._paces_s: dict[int, deque[float]] = {}  # of steps without drafts, amid rounds
        self._outside: dict[int, deque[float]] = {}  # times that, which such steps took with all that is around them
        self._fresh: set[int] = set()  # of which there was such a step since the last ones outside rounds
        self._drafted: dict[tuple[_Batch, int], _Shape] = {}  # by drafted tokens
        self._known: dict[_Batch, list[int]] = {}  # drafted tokens of the shapes that are known
        self._lines: dict[_Batch, tuple[float, float]] = {}  # through these, since one was seen: at 0, and a token more

    def observe(self, num_decodes: int, extra: int, seconds: float, *, computed: bool = False, count: int = 1) -> float:
        """Take in a step of `num_decodes` sequences with `extra` drafted tokens, or BETWEEN, and of `count` rounds;
        return by how much one with drafts was longer than usual."""
        self._level_s = self._level_s or seconds
        num_decodes = _alike(num_decodes)
        plain = self._plain.setdefault(num_decodes, _Shape(False, PLAIN_TRIALS, PLAIN_MEMORY_STEPS))
        if not extra:
            self._without(num_decodes, plain, seconds, count)
            return 0.0
        batch = _batch(num_decodes, extra, computed)
        if not plain.is_known:
            return 0.0
        shape = self._drafted.setdefault((batch, extra), _Shape())
        was_known = shape.is_known
        change = shape.observe(seconds / self._level_s / plain.share, count)
        self._lines.pop(batch, None)
        if extra > 0 and shape.is_known and not was_known:
            insort(self._known.setdefault(batch, []), extra)
        return change if extra > 0 else 0.0

    def _without(self, num_decodes: int, plain: _Shape, seconds: float, count: int) -> None:
        """Take in a step without drafts. Beside drafts few are seen, so that one which was disturbed would be believed
        for long: the median of the last ones counts, and alone says how fast the machine is."""
        recent = self._recent_s.setdefault(num_decodes, deque(maxlen=PLAIN_WINDOWS))
        recent.append(seconds)
        if num_decodes in self._fresh and plain.is_known:
            times = min(max(seconds / median(self._paces_s[num_decodes]), 1.0), MAX_OUTSIDE)
            self._outside.setdefault(num_decodes, deque(maxlen=PLAIN_WINDOWS)).append(times)
            self._fresh.discard(num_decodes)
            if self.is_paced(num_decodes):
                self._follow(num_decodes)
                return
        seconds = median(recent) if plain.is_known else seconds
        self._level_s *= 1 + LEVEL_GAIN * plain.observe(seconds / self._level_s, count, MAX_RATIO)

    def paced(self, num_decodes: int, seconds: float) -> None:
        """Take in what a step without drafts took amid rounds, by itself: in the same moment, so that the level
        follows it."""
        paces = self._paces_s.setdefault(num_decodes, deque(maxlen=PACES))
        paces.append(seconds)
        self._fresh.add(num_decodes)
        if self.is_paced(num_decodes):
            self._follow(num_decodes)

    def is_paced(self, num_decodes: int) -> bool:
        """Tell whether steps without drafts amid rounds say what one takes."""
        return len(self._outside.get(num_decodes, ())) >= PACES

    def _follow(self, num_decodes: int) -> None:
        """Set the level to what those amid rounds say."""
        times = sorted(self._outside[num_decodes])  # of few steps each, which others make longer, never shorter
        seconds = median(self._paces_s[num_decodes]) * times[len(times) // 4]
        self._level_s = seconds / self._plain[num_decodes].share

    def knows(self, num_decodes: int, extra: int, *, computed: bool = False) -> bool:
        """Tell whether steps of that shape were seen often enough."""
        batch = _batch(num_decodes, extra, computed)
        shape = self._drafted.get((batch, extra)) if extra else self._plain.get(_alike(num_decodes))
        return shape is not None and shape.is_known

    def is_tried(self, num_decodes: int) -> bool:
        """Tell whether steps that verify what a model drafts were seen so often that a disturbed one does not count."""
        batch = _batch(num_decodes, 1, True)
        shapes = [self._drafted[batch, extra] for extra in self._known.get(batch, ())[:1]]
        return any(len(shape.first) >= shape.trials for shape in shapes)

    def plain_s(self, num_decodes: int) -> float:
        """Return the seconds of a step without drafts that is known."""
        return self._level_s * self._plain[_alike(num_decodes)].share

    def most_tried(self, num_decodes: int, *, computed: bool = False) -> int:
        """Return how many drafted tokens a step may have: twice as many as are known, so that trying costs little."""
        known = self._known.get(_batch(num_decodes, 1, computed))
        return 2 * known[-1] if known else 1 if computed else FIRST_TRIED

    def ratio(self, num_decodes: int, extra: int, *, computed: bool = False) -> float:
        """Return how many times longer drafts make a step: between sizes that are known; beyond, growing as so far."""
        batch = _batch(num_decodes, extra, computed)
        if extra < 0:
            return max(self._drafted[batch, extra].share, 1.0) if self.knows(num_decodes, extra) else 1.0
        known = self._known.get(batch, [])
        if not known:  # a step with drafts overlaps no other, nor does one that asked for some
            return (1.0 if computed else self.ratio(num_decodes, BETWEEN)) + PRIOR_SLOPE * extra
        if computed and len(known) > 1:
            line = self._lines.get(batch) or self._lines.setdefault(batch, self._line(batch, known))
            return max(line[0] + line[1] * extra, 1.0)
        place = bisect_left(known, extra)
        if place < len(known) and known[place] == extra:
            return self._drafted[batch, extra].share
        one, other = (place - 1, place) if 0 < place < len(known) else (0, min(max(place - 1, 1), len(known) - 1))
        first, nearest = known[one], known[max(place - 1, 0)]
        share = self._drafted[batch, first].share
        slope = (share - 1) / first
        if one == other and extra > first:
            slope /= 2  # half of what one size takes more may be there with any
        elif one < other:
            slope = (self._drafted[batch, known[other]].share - share) / (known[other] - first)
        share = self._drafted[batch, nearest].share
        return max(share + max(slope, PRIOR_SLOPE) * (extra - nearest), 1.0)

    def _line(self, batch: _Batch, known: Sequence[int]) -> tuple[float, float]:
        """Return start and slope of the line through all sizes: a token more is a row to verify and a draft's step."""
        shapes = [self._drafted[batch, each] for each in known]
        weights = [min(shape.num_steps, MEMORY_STEPS) for shape in shapes]
        total = sum(weights)
        mean = sum(w * each for w, each in zip(weights, known)) / total
        level = sum(w * shape.share for w, shape in zip(weights, shapes)) / total
        rising = sum(w * (each - mean) * (shape.share - level) for w, each, shape in zip(weights, known, shapes))
        slope = max(rising / sum(w * (each - mean) ** 2 for w, each in zip(weights, known)), PRIOR_SLOPE)
        return level - slope * mean, slope


def _alike(num_decodes: int) -> int:
    """Return the number of sequences whose steps without drafts are taken to be as long."""
    return num_decodes if num_decodes < MANY else num_decodes - num_decodes % MANY_ALIKE


def _batch(num_decodes: int, extra: int, computed: bool) -> _Batch:
    return num_decodes.bit_length(), computed and extra > 0
