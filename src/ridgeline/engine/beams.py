"""Beam search: the outputs of the highest probability, found by a request's sequences, which share what they have.

A round gives each sequence what may follow it. Once that is known of all, the best go on: the first continuation of a
sequence in its own blocks, others in forks of them, copy-on-write, which take the place of sequences that nothing goes
on from. Nothing is computed twice but what was preempted.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ridgeline.core.params import SpeculationParams
from ridgeline.core.step import TokenLogprob
from ridgeline.decoding.request import Request
from ridgeline.engine.request import FinishReason, Sequence, TokenEvent

if TYPE_CHECKING:
    from ridgeline.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Beam:
    """The newest token of a chain of them, and the sum of their log-probabilities."""

    total: float = 0.0
    length: int = 0
    newest: TokenLogprob | None = None
    before: "Beam | None" = None

    def score(self, length_penalty: float, length: int | None = None) -> float:
        """Return the sum over the length, or over `length`, to the power of the penalty."""
        return self.total / (self.length if length is None else length) ** length_penalty

    def tokens(self) -> list[TokenLogprob]:
        """Return all tokens, the oldest first."""
        found: list[TokenLogprob] = []
        beam: Beam | None = self
        while beam is not None and beam.newest is not None:
            found.append(beam.newest)
            beam = beam.before
        return found[::-1]


class Search:
    """One beam search. `request` is what is `asked` for, with the log-probabilities that the search needs."""

    def __init__(self, asked: Request, length_penalty: float) -> None:
        self._width, self._num_shown, self._penalty = asked.params.n, asked.params.logprobs, length_penalty
        plain = SpeculationParams(enabled=False)
        params = replace(asked.params, temperature=0.0, logprobs=2 * self._width, speculation=plain)
        self.request = replace(asked, params=params)
        self._live: dict[int, Beam] = {}  # by sequence, the best first
        self._found: dict[int, list[Beam]] = {}  # by sequence, what may follow; of some, if they have all of a round
        self._done: list[Beam] = []
        self._sequences: Items[Sequence] = ()

    def begin(self, sequences: Items[Sequence]) -> None:
        """Start from the prompt, which is the first one's beam; the others wait."""
        self._sequences = tuple(sequences)
        self._go_on({sequences[0].seq_id: Beam()})

    def waits(self, seq_id: int) -> bool:
        """Tell whether it is known what may follow a sequence, but not of others."""
        return seq_id in self._found

    def take_in(self, seq_id: int, top: tuple[tuple[int, float], ...]) -> bool:
        """Take in what may follow a sequence. Return whether that is all."""
        beam = self._live[seq_id]
        self._found[seq_id] = [
            Beam(beam.total + value, beam.length + 1, TokenLogprob(token_id, value, rank, top), beam)
            for rank, (token_id, value) in enumerate(top, 1)
        ]
        return len(self._found) == self._width

    def go_on(self, scheduler: "Scheduler") -> None:
        """Start the next round, or end the search."""
        width, penalty = self._width, self._penalty
        found = sorted(
            ((beam, key) for key in self._live for beam in self._found[key]), key=lambda each: -each[0].total
        )
        self._found = {}
        length = found[0][0].length
        if length >= self.request.params.min_tokens:
            self._done += [beam for beam, _ in found[: 2 * width] if self._ends(beam)]
        self._done = sorted(self._done, key=lambda beam: -beam.score(penalty))[:width]
        going = [(beam, key) for beam, key in found if not self._ends(beam)][:width]
        longest = self.request.max_tokens if penalty > 0 else length
        is_last = length == self.request.max_tokens or not going
        if is_last or (
            len(self._done) == width and going[0][0].score(penalty, longest) <= self._done[-1].score(penalty)
        ):
            self._end(going, scheduler)
        else:
            self._share(going, scheduler)

    def _share(self, going: Items[tuple[Beam, int]], scheduler: "Scheduler") -> None:
        """Give each beam a sequence: that which it goes on from, or a fork of it."""
        by_id = {seq.seq_id: seq for seq in self._sequences}
        parents = {key for _, key in going}
        free = [seq for seq in self._sequences if seq.seq_id not in parents]
        live: dict[int, Beam] = {}
        for beam, key in going:
            if key in live:
                child = free.pop()
                _fork(by_id[key], child, scheduler)
                key = child.seq_id
            live[key] = beam
        for key, beam in live.items():
            assert beam.newest is not None, "a round adds a token"
            by_id[key].token_ids.append(beam.newest.token_id)
        self._go_on(live)
        for seq in [by_id[key] for key in live if by_id[key].is_aside]:
            scheduler.waiting.push(seq)

    def _end(self, going: Items[tuple[Beam, int]], scheduler: "Scheduler") -> None:
        """End the search: the best of what has ended and what goes on are the outputs."""
        best = sorted([*self._done, *[beam for beam, _ in going]], key=lambda beam: -beam.score(self._penalty))
        for seq, beam in zip(self._sequences, best):
            tokens, ends = beam.tokens(), self._ends(beam)
            seq.token_ids = [*self.request.prompt_ids, *[token.token_id for token in tokens]]
            for token in tokens:
                shown = None if self._num_shown is None else replace(token, top=token.top[: self._num_shown])
                is_end = ends and token is beam.newest
                scheduler.events.append(TokenEvent(self.request, seq.index, token.token_id, shown, is_end))
            reason = FinishReason.STOP if ends else FinishReason.LENGTH
            scheduler.end(seq, reason, stop_token_id=seq.token_ids[-1] if ends else None)
        for seq in self._sequences[len(best) :]:  # there are fewer where every continuation ends too early
            scheduler.end(seq, FinishReason.LENGTH)

    def _ends(self, beam: Beam) -> bool:
        return beam.newest is not None and beam.newest.token_id in self.request.stop_ids

    def _go_on(self, live: dict[int, Beam]) -> None:
        self._live = live
        self._found = {seq.seq_id: [] for seq in self._sequences if seq.seq_id not in live}


def _fork(parent: Sequence, child: Sequence, scheduler: "Scheduler") -> None:
    """Let a sequence go on from what another one has: in its blocks, where both have theirs."""
    if parent.num_computed and child.num_computed:
        scheduler.cache.release(child.seq_id)
        scheduler.cache.fork(parent.seq_id, child.seq_id)
        child.num_computed = parent.num_computed
    elif child.num_computed:
        scheduler.preempt(child)
    child.token_ids = list(parent.token_ids)
    scheduler.strategy.forget(child)
