"""How often drafted tokens are accepted: by what drafts, the evidence for it, their place, and the sequence."""

from dataclasses import dataclass

TRUST, DEAR_TRUST = 4.0, 1.75  # in what is usual; of drafts that a model computes, a wrong one of which takes long

Kind = tuple[str, int]  # a draft's method, and the evidence for it


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
    """How many of one sequence's drafted tokens were tried and accepted, and of how many it was expected."""

    tried: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0

    def chance(self, usual: float, trust: float) -> float:
        """Return the chance of a token whose `usual` one is given, by how this sequence's odds are beside the usual:
        that one is as good as `trust` tokens of either outcome."""
        odds = (trust + self.accepted) / (trust + self.tried - self.accepted)
        odds *= (trust + self.tried - self.expected) / (trust + self.expected)
        return usual * odds / (1 - usual + usual * odds)


class Acceptance:
    """Learns the chance of a drafted token, given that all before it were accepted.

    By the kind of the draft (its method and the evidence for it) and the token's place in it, for the engine, and by
    how this sequence's drafts of that method fare.
    """

    def __init__(self) -> None:
        self._chances: dict[tuple[Kind, int], _Chance] = {}
        self._sequences: dict[int, dict[str, _Sequence]] = {}  # by method

    def survival(self, seq_id: int, kind: Kind, num_tokens: int, trust: float = TRUST) -> list[float]:
        """Return, for each of a draft's tokens, the chance that it and all before it are accepted."""
        sequence = self._sequences.get(seq_id, {}).get(kind[0])
        chances: list[float] = []
        survives, last, chance = 1.0, 0, 0.0
        for position in range(num_tokens):
            if (place := _place(position)) != last:
                last, chance = place, self._mean(kind, place)
                if sequence is not None:
                    chance = sequence.chance(chance, trust)
            survives *= chance
            chances.append(survives)
        return chances

    def is_new(self, kind: Kind) -> bool:
        """Tell whether hardly a draft of that kind was tried."""
        first = self._chances.get((kind, 1))
        return first is None or first.accepted + first.rejected < 4

    def observe(self, seq_id: int, kind: Kind, num_drafted: int, num_accepted: int) -> None:
        """Take in a round. What lies behind the first rejected token was never tried."""
        sequence = self._sequences.setdefault(seq_id, {}).setdefault(kind[0], _Sequence())
        last, chance = 0, _Chance()
        for position in range(min(num_accepted + 1, num_drafted)):
            if (place := _place(position)) != last:
                last, chance = place, self._chance(kind, place)
            sequence.tried = sequence.tried * 0.97 + 1
            sequence.accepted = sequence.accepted * 0.97 + (position < num_accepted)
            sequence.expected = sequence.expected * 0.97 + chance.mean()
            chance.observe(position < num_accepted)

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        self._sequences.pop(seq_id, None)

    def _chance(self, kind: Kind, place: int) -> _Chance:
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
