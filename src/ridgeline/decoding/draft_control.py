"""How many tokens to draft: as many as raise the throughput, tokens gained a second, on the machine that runs.

A step that drafts e tokens beside those of n sequences takes r(n, e) times a step without drafts, and a draft whose
first j tokens are accepted with chance s_j gains s_1 + .. + s_k tokens. Drafting pays while n + gain over r exceeds n.
Both are learnt from the steps themselves, and what is right from drafts that are compared with what came anyway. Trying
what is not known takes time: where that does not pay it comes out of a purse, into which a small part of the time goes.
What a model drafts is compared with nothing while it rests, so it is tried now and then, with a small part of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from ridgeline.decoding.acceptance import Acceptance, Kind
from ridgeline.decoding.step_times import BETWEEN, LEVEL_GAIN, MANY, MAX_CHANGE, MAX_RATIO, TRIALS, StepTimes

EXTRA_TOKENS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafted tokens of a step: few shapes to learn
MIN_GAIN = 1.03  # of the throughput without drafts, below which none are made
PURSE_SHARE, SHARE_OF_MORE = 0.005, 0.002  # of the time that passes is spent on what does not pay, and of several
PURSE_STEPS, MAX_PURSE_STEPS = 16, 64  # steps without drafts: what a purse holds at first for one sequence, and at most
MAX_NAP_STEPS = 256
GAIN_MEMORY = 0.99  # of what drafting gained, a step
PEEK_STEPS, RARE_PEEK_STEPS = 6, 20  # in which one sequence's draft is looked at; the latter where it gains little
DULL_LOOKS, MAX_DULL = 4, 4  # looks in a row that promise nothing, after which they are rarer; and times that, at most
MAX_SPACING = 48  # steps between looks at what a model would draft, half as often each time that it does not pay
LOOK_SHARE_OF_FEW, LOOK_SHARE, LOOK_SHARE_OF_MANY = 0.004, 0.001, 0.0002  # of the time that looking takes, at most
TOLD_STEPS = 1024  # of more than a few sequences, in which a model is told once what it needs for a look
FEW = 4  # sequences: all are asked for drafts; of more, those whose last one promised something; MANY seldom are tried
PROMISING_TOKENS = 0.5  # that a draft gains
STEPS_BEHIND = 4  # without drafts, over which it is spread what the first of them takes more
WINDOW_STEPS = 8  # without drafts, timed together: plain steps are planned while others are computed
MAX_ASKED, MAX_UNCHECKED = 16, 256  # rounds that ask, at first and at most, before steps are timed that do not
PACED_ROUNDS = 4  # that count for one there, where a round amid them is timed that verifies nothing
ODD_STEPS = 4  # that take much longer or shorter than usual, behind which steps without drafts are timed
MAX_LAG = 8  # tokens that a model catches up with in a step of a draft's usual length
LAG_MEMORY = 0.9  # of what catching up took, each time
MAX_PER_LAG = 0.125  # steps without drafts for a token of it: what is longer was disturbed
FULL_ROUNDS = 64  # of a native call with a model, over which what is around it is spread at least
MAX_RUN = 16  # rounds that a lookup is taken to go on, at most
AROUND_GAIN = 0.1  # of what a call differs by, with which what is around one is learnt
MAX_AROUND = 2.0  # times what is usual around a call: what is longer was disturbed
GOES_ON_TOKENS = 64  # of an output, over which catching up has to pay
TRIAL_TAKES = 1.0  # steps without drafts: what trying one token takes behind its draft, with those planned late for it


@dataclass(slots=True)
class DraftControl:
    """Chooses how many tokens of each draft to verify, and when not even to ask for drafts.

    Drafts are looked at now and then while it `rests`, without a step for them, and they are asked for when they pay by
    what is known. What they save goes into a purse, and a small part of the time that passes; what they lose, and
    asking for them, goes out of it. Nothing is asked while it is empty, so that the small part is all that can be lost.
    Numbers of sequences of as many binary digits have a purse of their own.

    A model that drafts first computes the tokens by which it lags behind. What that takes is learnt apart.
    """

    times: StepTimes = field(default_factory=StepTimes)
    acceptance: Acceptance = field(default_factory=Acceptance)
    _purses_s: dict[int, float] = field(default_factory=dict[int, float])  # by `_purse_of` so many sequences
    _returns: bool = False  # whether the last step had drafts, or they were asked for
    _num_asked: int = 0  # rounds with drafts, or that asked for some, since steps without were timed
    _max_asked: int = MAX_ASKED
    _awake: bool = False
    _is_promising: bool = True  # the draft that was looked at last
    _num_dull: int = 0  # looks since one was
    _spacing: int = 0  # steps to the next look, at least, where that was one of a model
    _look_s: float = 0.0  # what looking at a draft takes
    _peeked: dict[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])  # the survivals seen last
    _asking_s: float = 0.0  # what it takes to choose what a model drafts, and to take in what it reads
    _drafting_s: float = 0.0  # what a model's first draft of a step takes without catching up
    _caught_up: tuple[float, float] = (0.0, 0.0)  # plain steps that catching up took of late, for how many tokens
    _around: dict[bool, tuple[float, float, int]] = field(default_factory=dict[bool, tuple[float, float, int]])
    _left_s: float = 0.0  # what is around the last call of rounds, which the step behind it takes too
    _plain: float = 0.0  # steps without drafts that what came of late would have taken, and how many of them it took
    _taken: float = 0.0

    @property
    def gain(self) -> float | None:
        """Return how many times the throughput without drafts it lately was; None: steps without are not known."""
        return self._plain / self._taken if self._taken else None

    @property
    def window_steps(self) -> int:
        """Return how many steps without drafts are timed together: the first one behind others is of its own kind."""
        return 1 if self._returns else WINDOW_STEPS

    @property
    def goes_on(self) -> bool:
        """Return whether drafts are asked for again as soon as steps without any are timed."""
        return self._awake

    def rests(self, num_decodes: int) -> bool:
        """Tell whether the next step is made as without drafts, whatever the one before brings."""
        if not self._awake or self._num_asked >= self._max_asked:
            return True
        return self._purses_s.get(_purse_of(num_decodes), 0.0) < 0 or not self.times.knows(num_decodes, 0)

    def paced(self, num_decodes: int, seconds: float) -> None:
        """Take in what a step without drafts took amid rounds, by itself; 0 if there was none."""
        if seconds:
            self.times.paced(num_decodes, seconds)

    def looked(self, seconds: float) -> None:
        """Take in how long it took to look at a draft."""
        self._look_s += LEVEL_GAIN * (seconds - self._look_s) if self._look_s else seconds

    def peek_steps(self, num_decodes: int) -> int:
        """Return how many steps lie between two looks at a draft."""
        least = RARE_PEEK_STEPS * min(1 + self._num_dull // DULL_LOOKS, MAX_DULL)
        if num_decodes <= FEW:
            least = max(PEEK_STEPS if self._is_promising else least, self._spacing)
        if num_decodes == 1 or not self.times.knows(num_decodes, 0):
            return least
        share = LOOK_SHARE_OF_FEW if num_decodes <= FEW else LOOK_SHARE if num_decodes < MANY else LOOK_SHARE_OF_MANY
        return max(least, int(self._look_s / (share * self.times.plain_s(num_decodes))))

    def looks_of_one(self, num_decodes: int) -> int:
        """Return of how many looks one is at what a model would draft, which first has to be told of steps."""
        return max(TOLD_STEPS // self.peek_steps(num_decodes), 1)

    def is_worth_asking(self, seq_id: int, num_decodes: int) -> bool:
        """Tell whether to ask for a draft of one of so many sequences: of many, those whose last one promised it."""
        return num_decodes <= FEW or seq_id in self._peeked

    def worth(self, lag: int, num_decodes: int, num_tokens: int) -> float:
        """Return what is left of a draft's gain where a model first catches up with `lag` tokens, which has to pay over
        the sequence's `num_tokens` to come."""
        return max(1 - self._catch_up_takes(lag) * num_decodes / min(num_tokens, GOES_ON_TOKENS), 0.0)

    def tries(self, num_decodes: int, num_steps: int, lag: int, kind: Kind) -> bool:
        """Tell whether a draft that need not pay is asked for now: its kind is new, or what a round takes of one
        text, or a small part of the `num_steps` at rest is as long as the trial; of many sequences always the last."""
        tries, is_known = self._can_pay(num_decodes, lag), not self.acceptance.is_new(kind)
        takes = TRIAL_TAKES + self._catch_up_takes(lag)
        if num_decodes == 1:  # what is tried goes on for many rounds
            is_known = is_known and self.times.is_tried(num_decodes)
        elif tries:
            takes += (self._asking_s + self._drafting_s) / self.times.plain_s(num_decodes)
        is_free = not is_known and num_decodes < MANY
        tries = tries and (is_free or num_steps * _share(num_decodes) >= takes)
        self._awake = self._awake or tries  # what pays rests too, while steps without drafts are timed
        return tries

    def _can_pay(self, num_decodes: int, lag: int) -> bool:
        """Tell whether the purse has what catching up takes."""
        if not self.times.knows(num_decodes, 0):
            return False
        least_s = self._catch_up_takes(lag) * self.times.plain_s(num_decodes)
        return self._purses_s.get(_purse_of(num_decodes), 0.0) >= least_s

    def _catch_up_takes(self, lag: int) -> float:
        """Return how many steps without drafts the catching up takes."""
        took, num_tokens = self._caught_up
        return lag * took / num_tokens if lag > MAX_LAG and num_tokens else 0.0

    def peek(self, seq_id: int, survival: Sequence[float], num_decodes: int, room: int, lag: int | None = None) -> None:
        """Take in what a draft of a sequence would have been worth; asks from now on if those of all pay.

        `lag` is what the model first catches up with that would draft it; None: no model would.
        """
        self._is_promising = sum(survival) > PROMISING_TOKENS
        self._num_dull = 0 if self._is_promising else self._num_dull + 1
        self._peeked.pop(seq_id, None)
        if self._is_promising:
            self._peeked[seq_id] = survival
            if self._can_pay(num_decodes, lag or 0):
                _, num_rounds, _ = self._around.get(lag is not None, (0.0, 1.0, 0))
                enters = (self.times.ratio(num_decodes, BETWEEN) - 1) / max(num_rounds, 1.0)  # once for all of a call
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
        self._num_asked += num_steps // (PACED_ROUNDS if self.times.is_paced(num_decodes) else 1) if asked else 0
        if asked:
            self._awake = extra > 0
        if asked and not extra:
            self._peeked.clear()
        seconds = self._without_the_last(num_decodes, kind, seconds)
        rounds, begins = num_steps if extra else 1, computed and not self._drafting_s  # which takes something once
        behind_s = self._usual_s(seconds, round_s if extra else None, rounds, lag, computed=computed)
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
            self._asking_s += LEVEL_GAIN * ((asking_s or 0.0) * num_steps - self._asking_s)
            self._drafted(drafting_s, lag, step_s)
        self._plain = GAIN_MEMORY * self._plain + (1 + gained / num_decodes) * num_steps
        self._taken = GAIN_MEMORY * self._taken + takes * num_steps
        is_known = self.times.knows(num_decodes, kind, computed=computed)
        if is_known and not begins:
            least = 1 + min((asking_s or 0.0) / step_s, MAX_RATIO)
            takes = max(self.times.ratio(num_decodes, kind, computed=computed), least) if kind else 1.0
            takes += self._catch_up_takes(lag) / rounds
        saved_s = (_share(num_decodes) + 1 + gained / num_decodes - takes) * step_s * num_steps
        self._awake = self._pay(num_decodes, saved_s, step_s) and self._awake

    def _pay(self, num_decodes: int, saved_s: float, step_s: float) -> bool:
        """Put what was saved, or lost, into the purse of so many sequences, and tell whether it can pay."""
        at_first = PURSE_STEPS / num_decodes if num_decodes <= FEW else 0.0  # each of them loses as long
        purse = _purse_of(num_decodes)
        purse_s = self._purses_s.get(purse, at_first * step_s) + saved_s
        least_s = -MAX_NAP_STEPS * _share(num_decodes) * step_s
        self._purses_s[purse] = min(max(purse_s, least_s), MAX_PURSE_STEPS * step_s)
        return purse_s >= 0

    def _without_the_last(self, num_decodes: int, kind: int, seconds: float) -> float:
        """Return what a step took without what it did for the call of rounds before it, whose tokens it delivers."""
        left_s, self._left_s = self._left_s, 0.0
        if kind != BETWEEN or not self.times.knows(num_decodes, 0):
            return seconds
        return max(seconds - left_s, min(seconds, self.times.plain_s(num_decodes)))

    def _usual_s(self, seconds: float, round_s: float | None, rounds: int, lag: int, *, computed: bool) -> float | None:
        """Return what a round of a step of usually many takes, of one of so many `rounds` with `seconds` each: what is
        around their native call is the same for one and for many. None: what catching up took is in it."""
        if round_s is None or (rounds == 1 and computed not in self._around):
            return seconds if lag <= MAX_LAG else None
        around_s, usual, calls = self._around.get(computed, (0.0, 1.0, 0))
        if lag <= MAX_LAG:  # else it caught up
            call_s = (seconds - round_s) * rounds
            if calls < TRIALS:  # the first are slow
                around_s = min(around_s or call_s, call_s)
            around_s += AROUND_GAIN * (min(call_s, MAX_AROUND * around_s) - around_s)
            usual += AROUND_GAIN * (rounds - usual)
            if computed and rounds > 1:  # calls of fewer are those that lookups and the ends of outputs cut short
                usual = max(usual, FULL_ROUNDS)
            self._around[computed] = around_s, usual, calls + 1
        self._left_s = around_s if rounds > 1 else 0.0
        return round_s + around_s / usual

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

    def best(self, num_decodes: int, survival: Sequence[float], *, computed: bool = False) -> int:
        """Return how many tokens of one draft are best, one that is there or that a model has `computed`."""
        return self._choose(num_decodes, [survival], len(survival), computed, 1.0, 0.0)[0]

    def looked_up(self, num_decodes: int, extra: int, gained: float, seconds: float, count: int) -> None:
        """Take in `count` rounds amid a model's that took `seconds` each and gained `gained` of `extra` tokens."""
        around_s, usual, _ = self._around.get(False, (0.0, 1.0, 0))
        usual_extra = max(size for size in EXTRA_TOKENS if size <= max(extra, 1))
        self.times.observe(num_decodes, usual_extra, seconds + around_s / usual, count=count)
        if self.times.knows(num_decodes, 0):
            self._plain += (1 + gained / num_decodes) * count
            self._taken += min(seconds / self.times.plain_s(num_decodes), MAX_RATIO) * count

    def pays_instead(
        self,
        num_decodes: int,
        found: Sequence[float],
        computed: Sequence[float],
        *,
        amid: bool = False,
        within: bool = False,
    ) -> bool:
        """Tell whether a draft that is there gains more than one that a model computes, by the survivals of both.

        As many tokens as come of its rounds, which go on while all of it is right, come later of the model's, without
        what is around the call that looks up; `amid` the model's rounds, with what is around their next call as well;
        `within` them, without either.
        """
        (length, round_takes, around), (own_length, own_takes, own_around) = (
            self._rounds_of(num_decodes, survival, computed=is_computed)
            for survival, is_computed in ((found, False), (computed, True))
        )
        if not length:
            return False
        num_rounds = 1 / max(1 - found[length - 1], 1 / MAX_RUN)
        num_tokens = num_rounds * (num_decodes + sum(found[:length]))
        takes = num_rounds * round_takes + (0.0 if within else around + (own_around if amid else 0.0))
        return num_tokens * own_takes >= takes * (num_decodes + sum(computed[:own_length]))

    def _rounds_of(self, num_decodes: int, survival: Sequence[float], *, computed: bool) -> tuple[int, float, float]:
        """Return how much of a draft is best, and what a round with it takes and what is around a call of rounds, as
        times a step without drafts."""
        length = self._choose(num_decodes, [survival], len(survival), computed, 1.0, 0.0)[0]
        ratio = self.times.ratio(num_decodes, length, computed=computed) if length else 1.0
        if not length or computed not in self._around or not self.times.knows(num_decodes, 0):
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


def _purse_of(num_decodes: int) -> int:
    """Return which purse pays for so many sequences: what drafts save one of them is not spent on several."""
    return num_decodes.bit_length()


def _share(num_decodes: int) -> float:
    """Return the share of the time that is spent on what does not pay."""
    return PURSE_SHARE if num_decodes <= FEW else SHARE_OF_MORE
