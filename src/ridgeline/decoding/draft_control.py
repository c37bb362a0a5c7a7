"""How many tokens to draft: as many as raise the throughput, tokens gained a second, on the machine that runs.

A step of m tokens takes T(m) seconds; a draft whose first j tokens are accepted with chance s_j gains s_1 + .. + s_k
tokens. Drafting pays while a token's chance over what it adds to T exceeds the throughput without it: none where the
machine is busy with many sequences already, some where a step waits for memory. T and the chances are learnt from the
steps themselves, of which those that draft nothing teach T too. No clock, no torch.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

EXTRA_TOKENS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafted tokens of a step: few shapes to learn
MIN_GAIN = 1.03  # of the throughput without drafts, below which none are made
PRIOR_SLOPE = 1 / 32  # growth of T a token where nothing is known: optimistic, so that it is tried
TRIALS = 4  # before a measured T counts for more than what was hoped: the first steps of a shape are slow
MEMORY_STEPS = 1024  # after which a measurement counts half
IDLE_STEPS = 8  # without a paying draft, after which proposers are not asked for a while
FIRST_NAP_STEPS, MAX_NAP_STEPS = 8, 64
FIRST_WAIT, MAX_WAIT = 4, 32  # rounds without drafts, each behind a rest of the control, between two probes
DRAFTING_WAIT = 12  # rounds with drafts between two probes

Kind = tuple[str, int]  # a draft's method, and the evidence for it


@dataclass(slots=True)
class _Seen:
    """The time of steps with one number of tokens, relative to the level of all; `weight` counts them."""

    share: float
    weight: float
    at_step: int


class StepTimes:
    """Learns T(m): a level that follows the machine's moods quickly, and each m's share of it slowly."""

    def __init__(self) -> None:
        self._level_s = 0.0
        self._seen: dict[int, _Seen] = {}
        self._sizes: list[int] = []
        self._step = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in a decode step of `num_tokens`."""
        self._step += 1
        seen = self._seen.get(num_tokens)
        if seen is None:
            share = 1.0 if not self._seen else seconds / self._level_s
            self._seen[num_tokens] = _Seen(share, 1.0, self._step)
            insort(self._sizes, num_tokens)
            if self._level_s == 0.0:
                self._level_s = seconds
            return
        now = min(seconds / seen.share, 2 * self._level_s)  # one step that somebody else disturbed says little
        self._level_s += 0.2 * (now - self._level_s)
        seen.weight = seen.weight * 0.5 ** ((self._step - seen.at_step) / MEMORY_STEPS) + 1
        seen.share += (min(seconds / self._level_s, 2 * seen.share) - seen.share) / min(seen.weight, 32.0)
        seen.at_step = self._step

    def knows(self, num_tokens: int) -> bool:
        """Tell whether steps of `num_tokens` were seen often enough."""
        seen = self._seen.get(num_tokens)
        return seen is not None and seen.weight * 0.5 ** ((self._step - seen.at_step) / MEMORY_STEPS) >= TRIALS - 1

    def expected_s(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens`, on the hopeful side where little is known."""
        return self._level_s * self._share(num_tokens)

    def _share(self, num_tokens: int) -> float:
        """Interpolate between the nearest sizes that are known well; beyond them T grows at least as it did so far."""
        known = [size for size in self._sizes if self.knows(size)] or self._sizes[:1]
        place = bisect_left(known, num_tokens)
        if place == 0:
            return self._seen[known[0]].share
        low = known[place - 1]
        at_low = self._seen[low].share
        if place < len(known):
            slope = (self._seen[known[place]].share - at_low) / (known[place] - low)
        else:
            slope = at_low * PRIOR_SLOPE
            if place > 1:
                slope = max(slope, (at_low - self._seen[known[place - 2]].share) / (low - known[place - 2]))
        return at_low + slope * (num_tokens - low)


@dataclass(slots=True)
class _Chance:
    """Beta posterior of being accepted, of drafted tokens that are alike; older rounds fade."""

    accepted: float = 1.0
    rejected: float = 1.0

    def mean(self) -> float:
        return self.accepted / (self.accepted + self.rejected)

    def observe(self, was_accepted: bool) -> None:
        self.accepted = 1 + (self.accepted - 1) * 0.995 + was_accepted
        self.rejected = 1 + (self.rejected - 1) * 0.995 + (not was_accepted)


@dataclass(slots=True)
class _Sequence:
    """How one sequence's drafts fared beside what was expected of them."""

    accepted: float = 0.0
    expected: float = 0.0

    def factor(self) -> float:
        return (8 + self.accepted) / (8 + self.expected)


_NO_SEQUENCE: Final[Mapping[str, _Sequence]] = {}


class Acceptance:
    """Learns the chance of a drafted token, given that all before it were accepted.

    By the kind of the draft (its method and the evidence for it) and the token's place in it, for the engine, and by
    how this sequence's drafts of that method fare.
    """

    def __init__(self) -> None:
        self._chances: dict[tuple[Kind, int], _Chance] = {}
        self._sequences: dict[int, dict[str, _Sequence]] = {}  # by method

    def survival(self, seq_id: int, kind: Kind, num_tokens: int) -> list[float]:
        """Return, for each of a draft's tokens, the chance that it and all before it are accepted."""
        sequence = self._sequences.get(seq_id, _NO_SEQUENCE).get(kind[0])
        factor = 1.0 if sequence is None else sequence.factor()
        chances: list[float] = []
        survives = 1.0
        for position in range(num_tokens):
            survives *= min(self._mean(kind, _place(position)) * factor, 0.995)
            chances.append(survives)
        return chances

    def observe(self, seq_id: int, kind: Kind, num_drafted: int, num_accepted: int) -> None:
        """Take in a round. What lies behind the first rejected token was never tried."""
        sequence = self._sequences.setdefault(seq_id, {}).setdefault(kind[0], _Sequence())
        for position in range(min(num_accepted + 1, num_drafted)):
            chance = self._chance(kind, position)
            sequence.accepted = sequence.accepted * 0.97 + (position < num_accepted)
            sequence.expected = sequence.expected * 0.97 + chance.mean()
            chance.observe(position < num_accepted)

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        self._sequences.pop(seq_id, None)

    def _chance(self, kind: Kind, position: int) -> _Chance:
        place = _place(position)
        chance = self._chances.get((kind, place))
        if chance is None:
            mean = self._mean(kind, place)
            chance = self._chances[kind, place] = _Chance(2 * mean, 2 - 2 * mean)
        return chance

    def _mean(self, kind: Kind, place: int) -> float:
        """Return the chance at a place of a draft; until it was tried there, that of the places before it."""
        while place and (kind, place) not in self._chances:
            place -= 1
        return self._chances[kind, place].mean() if place else 0.5


def _place(position: int) -> int:
    """Return which places of a draft are alike: the first token, the next 2, the next 4, and what is behind them."""
    return min((position + 1).bit_length(), 4)


@dataclass(slots=True)
class DraftControl:
    """Chooses how many tokens of each draft to verify, and when not even to ask for drafts."""

    times: StepTimes = field(default_factory=StepTimes)
    acceptance: Acceptance = field(default_factory=Acceptance)
    _idle: int = 0
    _nap: int = 0
    _next_nap: int = FIRST_NAP_STEPS

    @property
    def rests(self) -> bool:
        """Whether the next step should be planned without asking for drafts."""
        return self._nap > 0

    def step(self, num_tokens: int, seconds: float) -> None:
        """Take in a decode step of `num_tokens`."""
        self._nap = max(self._nap - 1, 0)
        self.times.observe(num_tokens, seconds)

    def choose(self, num_decodes: int, survivals: Sequence[Sequence[float]], room: int) -> list[int]:
        """Return how many tokens of each draft to verify beside `num_decodes` tokens, at most `room` in all.

        `survivals` are those of `Acceptance`, one list a draft.
        """
        none = [0] * len(survivals)
        if not survivals:
            self._rest(False)
            self._nap = min(self._nap, FIRST_NAP_STEPS)  # a guess may come with any token
            return none
        if not self.times.knows(num_decodes):
            return none  # what a step costs without drafts comes first
        ranked = sorted(
            ((chance, draft) for draft, chances in enumerate(survivals) for chance in chances), reverse=True
        )[: min(room, EXTRA_TOKENS[-1])]
        best, best_rate = 0, MIN_GAIN * num_decodes / self.times.expected_s(num_decodes)
        gained, used = float(num_decodes), 0
        for extra in EXTRA_TOKENS[1:]:
            if extra > len(ranked):
                break
            gained += sum(chance for chance, _ in ranked[used:extra])
            used = extra
            new = not self.times.knows(num_decodes + extra)
            rate = gained / self.times.expected_s(num_decodes + extra)
            if rate > best_rate:
                best, best_rate = extra, rate
                if new:  # one size further at a time, so that trying costs little
                    break
        self._rest(best > 0)
        for _, draft in ranked[:best]:
            none[draft] += 1
        return none

    def _rest(self, pays: bool) -> None:
        """Wait longer and longer while drafts do not pay."""
        if pays:
            self._idle, self._next_nap = 0, FIRST_NAP_STEPS
            return
        self._idle += 1
        if self._idle >= IDLE_STEPS:
            self._idle, self._nap = IDLE_STEPS - 1, self._next_nap
            self._next_nap = min(2 * self._next_nap, MAX_NAP_STEPS)


class Probes:
    """Says when to draft one token more than pays: nothing is learnt of what is never drafted, and texts change.

    Now and then while drafts pay, less and less often while none do.
    """

    def __init__(self) -> None:
        self._waited, self._wait = 0, FIRST_WAIT
        self._drafted = False

    def due(self, drafts: bool) -> bool:
        """Take in whether a round drafts at all; return whether it should draft one token more."""
        if drafts is not self._drafted:
            self._drafted, self._waited, self._wait = drafts, 0, FIRST_WAIT
        self._waited += 1
        if self._waited < self._wait:
            return False
        self._waited = 0
        self._wait = DRAFTING_WAIT if drafts else min(2 * self._wait, MAX_WAIT)
        return True
