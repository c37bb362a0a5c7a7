"""The outputs that have not ended, wherever they are: queued, running, or still to be forked."""

import itertools
from collections.abc import Sequence as Items

from ridgeline.decoding.request import Request
from ridgeline.engine.beams import Search
from ridgeline.engine.request import Sequence

MIN_LOOKED = 2**14  # tokens of a vocabulary: of fewer, to find out which are allowed takes no longer than to ask of one


class Unfinished:
    """Sequences that run on, by request. Every step looks for late ones, so those with a deadline are known apart."""

    def __init__(self) -> None:
        self._sequences: dict[str, list[Sequence]] = {}
        self._seq_ids = itertools.count()
        self._deadlines_s: dict[str, float] = {}
        self._held: set[str] = set()  # requests whose callers do not keep up

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences.get(seq.request.request_id, ())

    def add(self, request: Request) -> Sequence:
        """Make the sequences of a request; return the one that computes the prompt, which carries the others."""
        count = request.params.n
        search = None if request.length_penalty is None else Search(request, request.length_penalty)
        request = request if search is None else search.request
        sequences = [Sequence(next(self._seq_ids), request, index, list(request.prompt_ids)) for index in range(count)]
        if search is not None:
            search.begin(sequences)
        for seq in sequences:
            if (grammar := request.grammar) is not None:
                seq.grammar = grammar.start(guesses=request.params.takes_largest and grammar.vocab_size >= MIN_LOOKED)
            seq.search = search
        sequences[0].siblings = sequences[1:]
        self._sequences[request.request_id] = sequences
        if request.deadline_s is not None:
            self._deadlines_s[request.request_id] = request.deadline_s
        return sequences[0]

    def of(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request, in their order; none for unknown and finished ones."""
        return list(self._sequences.get(request_id, ()))

    def request_ids(self) -> list[str]:
        return list(self._sequences)

    def late(self, now_s: float) -> list[Sequence]:
        """Return every sequence whose deadline has passed."""
        return [seq for name, end_s in self._deadlines_s.items() if end_s <= now_s for seq in self._sequences[name]]

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence; return whether it was still to be forked from another one."""
        request_id = seq.request.request_id
        others = self._sequences[request_id]
        others.remove(seq)
        if not others:
            del self._sequences[request_id]
            self._deadlines_s.pop(request_id, None)
            self._held.discard(request_id)
        carrier = next((other for other in others if seq in other.siblings), None)
        if carrier is not None:
            carrier.siblings.remove(seq)
        return carrier is not None

    def hold(self, request_id: str, held: bool) -> list[Sequence]:
        """Hold a request, or let it go: return its sequences that go on."""
        if held:
            self._held.update({request_id} & self._sequences.keys())
            return []
        self._held.discard(request_id)
        aside = [seq for seq in self.of(request_id) if seq.is_aside and not seq.waits]
        for seq in aside:
            seq.is_aside = False
        return aside

    def leaving(self, running: Items[Sequence]) -> list[Sequence]:
        """Return which of the `running` stand aside from now on: those of held requests that decode."""
        if not self._held:
            return []
        leaving = [seq for seq in running if seq.request.request_id in self._held and seq.is_decoding]
        for seq in leaving:
            seq.is_aside = True
        return leaving


def hand_over(seq: Sequence) -> Sequence | None:
    """Let the next output carry its siblings, from the start, when the one that carried the prompt is gone."""
    if not seq.siblings:
        return None
    heir, *rest = seq.siblings
    heir.siblings, seq.siblings = rest, []
    return heir
