"""How many tokens to draft: as many as raise the throughput, tokens gained a second, on the machine that runs.

A step that drafts e tokens beside those of n sequences takes r(n, e) times a step without drafts, and a draft whose
first j tokens are accepted with chance s_j gains s_1 + .. + s_k tokens. Drafting pays while n + gain over r exceeds n.
Both are learnt from the steps themselves, and what is right from drafts that are compared with what came anyway. Trying
what is not known takes time: where that does not pay it comes out of a purse, into which a small part of the time goes.
What a model drafts is compared with nothing while it rests, so it is tried now and then, with a small part of the time.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Final

from ridgeline.decoding.acceptance import Acceptance, Kind

EXTRA_TOKENS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafted tokens of a step: few shapes to learn
MIN_GAIN = 1.03  # of the throughput without drafts, below which none are made
FIRST_TRIED = 4  # drafted tokens of a step, at most, where nothing is known
PRIOR_SLOPE = 1 / 64  # growth of a step a token where nothing is known: optimistic, so that it is tried
TRIALS, PLAIN_TRIALS = 4, 4  # steps of a shape, the first of which are slow, before it is known; windows without drafts
PLAIN_WINDOWS = 5  # without drafts, of whose times the median counts
MEMORY_STEPS, PLAIN_MEMORY_STEPS = 64, 16  # over which a shape is learnt; few are seen without drafts
LEVEL_GAIN, MAX_CHANGE = 0.3, 0.25  # of a step's change that the level follows, and that is believed at most
PURSE_SHARE = 0.005  # of the time that passes is spent on what does not pay
PURSE_STEPS, MAX_PURSE_STEPS = 16, 64  # steps without drafts: what the purse holds at first of few, and at most
MAX_RATIO = 8.0  # of one step to one without drafts: what is longer was disturbed
MAX_NAP_STEPS = 256
GAIN_MEMORY = 0.99  # of what drafting gained, a step
BETWEEN = -1  # instead of drafted tokens: none, but drafts were asked for, or the step before had some
PEEK_STEPS, RARE_PEEK_STEPS = 6, 20  # in which one sequence's draft is looked at; the latter where it gains little
MAX_SPACING = 48  # steps between looks at what a model would draft, half as often each time that it does not pay
LOOK_SHARE = 0.001  # of the time that looking takes, at most, where there are many sequences: of each it says little
FEW = 4  # sequences, of which all are asked for drafts
PROMISING_TOKENS = 0.5  # that a draft gains
STEPS_BEHIND = 4  # without drafts, over which it is spread what the first of them takes more
WINDOW_STEPS = 8  # without drafts, timed together: plain steps are planned while others are computed
MAX_ASKED, MAX_UNCHECKED = 16, 256  # rounds that ask, at first and at most, before steps are timed that do not
ODD_STEPS = 4  # that take much longer or shorter than usual, behind which steps without drafts are timed
MAX_LAG = 8  # tokens that a model catches up with in a step of a draft's usual length
LAG_MEMORY = 0.9  # of what catching up took, each time
MAX_PER_LAG = 0.125  # steps without drafts for a token of it: what is longer was disturbed
FULL_ROUNDS = 32  # of a native call with a model, over which what is around it is spread at least
MAX_RUN = 16  # rounds that a lookup is taken to go on, at most
AROUND_GAIN = 0.1  # of what a call differs by, with which what is around one is learnt
MAX_AROUND = 2.0  # times what is usual around a call: what is longer was disturbed
GOES_ON_TOKENS = 64  # of an output, over which catching up has to pay
TRIAL_TAKES = 1.0  # steps without drafts: what trying one token takes, with the steps that are planned late for it


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
        was_known = self.is_known
        self.num_steps += count
        if not was_known:
            self.first.append(share)
            self.share = min(self.first) if self.is_tried else median(self.first[-3:])
            return 0.0
        change = min(max(share / self.share - 1, -max_change), max_change)
        self.share *= 1 + change * count / min(self.num_steps, self.memory_steps)
        return change


_Batch = tuple[int, bool]  # digits of the number of sequences, and whether a model computes the drafts


class StepTimes:
    """Learns what steps without drafts take, as shares of a level that follows the machine's moods, and how many times
    longer drafts make them: alike for numbers of sequences of as many binary digits, and apart where a model computes
    them.
    """

    def __init__(self) -> None:
        self._level_s = 0.0
        self._plain: dict[int, _Shape] = {}  # by sequences
        self._recent_s: dict[int, deque[float]] = {}
        self._drafted: dict[tuple[_Batch, int], _Shape] = {}  # by drafted tokens
        self._known: dict[_Batch, list[int]] = {}  # drafted tokens of the shapes that are known

    def observe(self, num_decodes: int, extra: int, seconds: float, *, computed: bool = False, count: int = 1) -> float:
        """Take in a step of `num_decodes` sequences with `extra` drafted tokens, or BETWEEN, and of `count` rounds;
        return by how much one with drafts was longer than usual."""
        self._level_s = self._level_s or seconds
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
        if extra > 0 and shape.is_known and not was_known:
            insort(self._known.setdefault(batch, []), extra)
        return change if extra > 0 else 0.0

    def _without(self, num_decodes: int, plain: _Shape, seconds: float, count: int) -> None:
        """Take in a step without drafts. Beside drafts few are seen, so that one which was disturbed would be believed
        for long: the median of the last ones counts, and alone says how fast the machine is."""
        recent = self._recent_s.setdefault(num_decodes, deque(maxlen=PLAIN_WINDOWS))
        recent.append(seconds)
        seconds = median(recent) if plain.is_known else seconds
        self._level_s *= 1 + LEVEL_GAIN * plain.observe(seconds / self._level_s, count, MAX_RATIO)

    def knows(self, num_decodes: int, extra: int, *, computed: bool = False) -> bool:
        """Tell whether steps of that shape were seen often enough."""
        batch = _batch(num_decodes, extra, computed)
        shape = self._drafted.get((batch, extra)) if extra else self._plain.get(num_decodes)
        return shape is not None and shape.is_known

    def plain_s(self, num_decodes: int) -> float:
        """Return the seconds of a step without drafts that is known."""
        return self._level_s * self._plain[num_decodes].share

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
            return self._on_line(batch, known, extra)
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

    def _on_line(self, batch: _Batch, known: Sequence[int], extra: int) -> float:
        """Return the ratio on the line through all sizes: a token more is a row to verify and a draft's step more."""
        shapes = [self._drafted[batch, each] for each in known]
        weights = [min(shape.num_steps, MEMORY_STEPS) for shape in shapes]
        total = sum(weights)
        mean = sum(w * each for w, each in zip(weights, known)) / total
        level = sum(w * shape.share for w, shape in zip(weights, shapes)) / total
        rising = sum(w * (each - mean) * (shape.share - level) for w, each, shape in zip(weights, known, shapes))
        slope = max(rising / sum(w * (each - mean) ** 2 for w, each in zip(weights, known)), PRIOR_SLOPE)
        return max(level + slope * (extra - mean), 1.0)


def _batch(num_decodes: int, extra: int, computed: bool) -> _Batch:
    return num_decodes.bit_length(), computed and extra > 0


@dataclass(slots=True)
class DraftControl:
    """Chooses how many tokens of each draft to verify, and when not even to ask for drafts.

    Drafts are looked at now and then while it `rests`, without a step for them, and they are asked for when they pay by
    what is known. What they save goes into a purse, and a small part of the time that passes; what they lose, and
    asking for them, goes out of it. Nothing is asked while it is empty, so that the small part is all that can be lost.

    A model that drafts first computes the tokens by which it lags behind. What that takes is learnt apart.
    """

    times: StepTimes = field(default_factory=StepTimes)
    acceptance: Acceptance = field(default_factory=Acceptance)
    _purse_s: float | None = None
    _was_few: bool = False  # whether few sequences ran yet
    _returns: bool = False  # whether the last step had drafts, or they were asked for
    _num_asked: int = 0  # rounds with drafts, or that asked for some, since steps without were timed
    _max_asked: int = MAX_ASKED
    _awake: bool = False
    _is_promising: bool = True  # the draft that was looked at last
    _spacing: int = 0  # steps to the next look, at least, where that was one of a model
    _look_s: float = 0.0  # what looking at a draft takes
    _peeked: dict[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])  # the survivals seen last
    _drafting_s: float = 0.0  # what a model's first draft of a step takes without catching up
    _caught_up: tuple[float, float] = (0.0, 0.0)  # plain steps that catching up took of late, for how many tokens
    _around: dict[bool, tuple[float, float, int]] = field(default_factory=dict[bool, tuple[float, float, int]])
    _plain: float = 0.0  # steps without drafts that what came of late would have taken, and how many of them it took
    _taken: float = 0.0

    @property
    def gain(self) -> float | None:
        """Return how many times the throughput without drafts it lately was; None: steps without are not known."""
        return self._plain / self._taken if self._taken else None

    @property
    def _is_empty(self) -> bool:
        return self._purse_s is not None and self._purse_s < 0

    @property
    def window_steps(self) -> int:
        """Return how many steps without drafts are timed together: the first one behind others is of its own kind."""
        return 1 if self._returns else WINDOW_STEPS

    def rests(self, num_decodes: int) -> bool:
        """Tell whether the next step is made as without drafts, whatever the one before brings."""
        asks = self._awake and not self._is_empty and self._num_asked < self._max_asked
        return not asks or not self.times.knows(num_decodes, 0)

    def looked(self, seconds: float) -> None:
        """Take in how long it took to look at a draft."""
        self._look_s += LEVEL_GAIN * (seconds - self._look_s) if self._look_s else seconds

    def peek_steps(self, num_decodes: int) -> int:
        """Return how many steps lie between two looks at a draft."""
        if num_decodes <= FEW:
            return max(PEEK_STEPS if self._is_promising else RARE_PEEK_STEPS, self._spacing)
        step_s = self.times.plain_s(num_decodes) if self.times.knows(num_decodes, 0) else 0.0
        return max(RARE_PEEK_STEPS, int(self._look_s / (LOOK_SHARE * step_s)) if step_s else 0)

    def is_worth_asking(self, seq_id: int, num_decodes: int) -> bool:
        """Tell whether to ask for a draft of one of so many sequences: of many, those whose last one promised it."""
        return num_decodes <= FEW or seq_id in self._peeked

    def worth(self, lag: int, num_decodes: int, num_tokens: int) -> float:
        """Return what is left of a draft's gain where a model first catches up with `lag` tokens, which has to pay over
        the sequence's `num_tokens` to come."""
        return max(1 - self._catch_up_takes(lag) * num_decodes / min(num_tokens, GOES_ON_TOKENS), 0.0)

    def tries(self, num_decodes: int, num_steps: int, lag: int, kind: Kind) -> bool:
        """Tell whether a draft that need not pay is asked for now: its kind is new, or a small part of the `num_steps`
        at rest is as long as the trial."""
        is_due = num_steps * PURSE_SHARE >= TRIAL_TAKES + self._catch_up_takes(lag)
        is_due = is_due or self.acceptance.is_new(kind)
        self._awake = is_due and self._can_pay(num_decodes, lag)
        return self._awake

    def _can_pay(self, num_decodes: int, lag: int) -> bool:
        """Tell whether the purse has what catching up takes."""
        if self._is_empty or not self.times.knows(num_decodes, 0):
            return False
        least_s = self._catch_up_takes(lag) * self.times.plain_s(num_decodes)
        return self._purse_s is None or self._purse_s >= least_s

    def _catch_up_takes(self, lag: int) -> float:
        """Return how many steps without drafts the catching up takes."""
        took, num_tokens = self._caught_up
        return lag * took / num_tokens if lag > MAX_LAG and num_tokens else 0.0

    def peek(self, seq_id: int, survival: Sequence[float], num_decodes: int, room: int, lag: int | None = None) -> None:
        """Take in what a draft of a sequence would have been worth; asks from now on if those of all pay.

        `lag` is what the model first catches up with that would draft it; None: no model would.
        """
        self._is_promising = sum(survival) > PROMISING_TOKENS
        self._peeked.pop(seq_id, None)
        if self._is_promising:
            self._peeked[seq_id] = survival
            if self._can_pay(num_decodes, lag or 0):
                enters = self.times.ratio(num_decodes, BETWEEN) - 1
                given = list(self._peeked.values()), room, lag is not None
                self._awake = any(self._choose(num_decodes, *given, 1.0, enters))
        grown = PEEK_STEPS if self._awake else min(max(2 * self._spacing, PEEK_STEPS), MAX_SPACING)
        self._spacing = 0 if lag is None else grown

    def step(
        self,
        num_decodes: int,
        extra: int,
        gained: float,
        seconds: float,
        asking_s: float | None,
        num_steps: int = 1,
        lag: int = 0,
        drafting_s: float = 0.0,
        *,
        computed: bool = False,
        round_s: float | None = None,
    ) -> None:
        """Take in a step of `num_decodes` sequences that gained `gained` of `extra` drafted tokens.

        `seconds` is how long it took, with `asking_s` before drafts were chosen; None: nobody asked. Of
        `num_steps` that are alike, or rounds that a model has `computed` drafts in, it is the median or the mean. The
        draft of the first of these took `drafting_s`, in which it caught up with `lag` tokens; a round takes `round_s`
        by itself.
        """
        asked = asking_s is not None
        kind = extra or (BETWEEN if self._returns or asked else 0)
        self._returns = extra > 0 or asked
        if kind == 0:
            if self._num_asked >= self._max_asked:
                self._max_asked = min(2 * self._max_asked, MAX_UNCHECKED)
            self._num_asked = 0
        self._num_asked += num_steps if asked else 0
        if asked:
            self._awake = extra > 0
        if asked and not extra:
            self._peeked.clear()
        rounds = num_steps if extra else 1
        behind_s = seconds if lag <= MAX_LAG else None
        if round_s is not None and extra and (rounds > 1 or computed in self._around):
            behind_s = round_s + self._around_round_s(seconds - round_s, rounds, lag, computed=computed)
        begins = computed and not self._drafting_s  # what a model takes that begins to draft it takes once
        if behind_s is not None and not begins:
            change = self.times.observe(num_decodes, kind, behind_s, computed=computed, count=rounds)
            self._num_asked += self._max_asked // ODD_STEPS if abs(change) >= MAX_CHANGE else 0
        if not self.times.knows(num_decodes, 0):
            return
        step_s = self.times.plain_s(num_decodes)
        takes = min(seconds / step_s, MAX_RATIO)  # as it was, unless it is known better
        if begins:
            takes, self._drafting_s = min(takes, self.times.ratio(num_decodes, kind, computed=True)), drafting_s
        elif computed:
            self._drafted(drafting_s, lag, step_s)
        self._plain = GAIN_MEMORY * self._plain + (1 + gained / num_decodes) * num_steps
        self._taken = GAIN_MEMORY * self._taken + takes * num_steps
        is_known = self.times.knows(num_decodes, kind, computed=computed)
        if is_known and not begins:
            least = 1 + min((asking_s or 0.0) / step_s, MAX_RATIO)
            takes = max(self.times.ratio(num_decodes, kind, computed=computed), least) if kind else 1.0
            takes += self._catch_up_takes(lag) / rounds
        saved_s = (PURSE_SHARE + 1 + gained / num_decodes - takes) * step_s * num_steps
        purse_s = (self._purse_s or 0.0) + saved_s
        if num_decodes <= FEW and not self._was_few:  # of many, each would lose as long
            purse_s, self._was_few = purse_s + PURSE_STEPS * step_s, True
        self._purse_s = min(max(purse_s, -MAX_NAP_STEPS * PURSE_SHARE * step_s), MAX_PURSE_STEPS * step_s)
        self._awake = self._awake and purse_s >= 0

    def _around_round_s(self, seconds: float, rounds: int, lag: int, *, computed: bool) -> float:
        """Return what is around a round of a usual step, where one of so many `rounds` has `seconds` each: what is
        around the native call is the same for one round and for many."""
        around_s, usual, calls = self._around.get(computed, (0.0, 1.0, 0))
        if lag <= MAX_LAG:  # else it caught up
            call_s = seconds * rounds
            if calls < TRIALS:  # the first are slow
                around_s = min(around_s or call_s, call_s)
            around_s += AROUND_GAIN * (min(call_s, MAX_AROUND * around_s) - around_s)
            usual += AROUND_GAIN * (rounds - usual)
            if computed and rounds > 1:  # calls of fewer are those that lookups and the ends of outputs cut short
                usual = max(usual, FULL_ROUNDS)
            self._around[computed] = around_s, usual, calls + 1
        return around_s / usual

    def _drafted(self, drafting_s: float, lag: int, step_s: float) -> None:
        """Take in how long the first draft of a step took; where it caught up with tokens, these took the rest."""
        if lag <= MAX_LAG:
            self._drafting_s += LEVEL_GAIN * (drafting_s - self._drafting_s)
            return
        more = min(max(drafting_s - self._drafting_s, 0.0) / step_s, MAX_PER_LAG * lag)
        self._caught_up = LAG_MEMORY * self._caught_up[0] + more, LAG_MEMORY * self._caught_up[1] + lag

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        self.acceptance.forget(seq_id)
        self._peeked.pop(seq_id, None)

    def choose(
        self, num_decodes: int, survivals: Sequence[Sequence[float]], room: int, *, computed: bool = False
    ) -> list[int]:
        """Return how many tokens of each draft to verify beside `num_decodes` tokens, at most `room` in all.

        `survivals` are those of `Acceptance`, one list a draft; `computed`: a model computes drafts.
        """
        leaves = self.times.ratio(num_decodes, BETWEEN) - 1
        return self._choose(num_decodes, survivals, room, computed, 1 + leaves / STEPS_BEHIND, 0.0)

    def pays_instead(
        self, num_decodes: int, found: Sequence[float], computed: Sequence[float], *, amid: bool = False
    ) -> bool:
        """Tell whether a draft that is there gains more than one that a model computes, by the survivals of both.

        As many tokens as come of its rounds, which go on while all of it is right, come later of the model's, without
        what is around the call that looks up; `amid` the model's rounds, with what is around their next call as well.
        """
        (length, round_takes, around), (own_length, own_takes, own_around) = (
            self._rounds_of(num_decodes, survival, computed=is_computed)
            for survival, is_computed in ((found, False), (computed, True))
        )
        if not length:
            return False
        num_rounds = 1 / max(1 - found[length - 1], 1 / MAX_RUN)
        num_tokens = num_rounds * (num_decodes + sum(found[:length]))
        takes = around + num_rounds * round_takes + (own_around if amid else 0.0)
        return num_tokens * own_takes >= takes * (num_decodes + sum(computed[:own_length]))

    def _rounds_of(self, num_decodes: int, survival: Sequence[float], *, computed: bool) -> tuple[int, float, float]:
        """Return how much of a draft is best, and what a round with it takes and what is around a call of rounds, as
        times a step without drafts."""
        length = self._choose(num_decodes, [survival], len(survival), computed, 1.0, 0.0)[0]
        ratio = self.times.ratio(num_decodes, length, computed=computed) if length else 1.0
        if not length or computed not in self._around:
            return length, ratio, 0.0
        around_s, usual, _ = self._around[computed]
        around = around_s / self.times.plain_s(num_decodes)
        return length, max(ratio - around / usual, 1.0), around

    def _choose(
        self,
        num_decodes: int,
        survivals: Sequence[Sequence[float]],
        room: int,
        computed: bool,
        least: float,
        enters: float,
    ) -> list[int]:
        """Do `choose` where a step without drafts takes `least` and the first one with some `enters` more."""
        lengths = [0] * len(survivals)
        ranked = [(chance, draft) for draft, each in enumerate(survivals) for chance in each]
        ranked.sort(reverse=True)
        del ranked[min(room, EXTRA_TOKENS[-1]) :]
        best, best_rate = 0, MIN_GAIN * num_decodes / least
        gained = list(accumulate((chance for chance, _ in ranked), initial=float(num_decodes)))
        most = min(len(ranked), self.times.most_tried(num_decodes, computed=computed))
        for extra in EXTRA_TOKENS[1:]:
            if extra > most:
                break
            rate = gained[extra] / (self.times.ratio(num_decodes, extra, computed=computed) + enters)
            if rate > best_rate:
                best, best_rate = extra, rate
        for _, draft in ranked[:best]:
            lengths[draft] += 1
        return lengths
