"""Several outputs to one request (n > 1): the first computes the prompt, the others share what it has computed."""

from collections.abc import Iterator

from ridgeline.cache.manager import CacheManager
from ridgeline.engine.request import Request, Sequence


def sequences_of(request: Request, seq_ids: Iterator[int]) -> list[Sequence]:
    """Return one sequence for each output; the first carries the others until they are forked."""
    first, *others = (
        Sequence(next(seq_ids), request, index, list(request.prompt_ids)) for index in range(request.params.n)
    )
    if request.grammar is not None:
        for seq in (first, *others):
            seq.grammar = request.grammar.start()
    first.siblings = others
    return [first, *others]


def fork_siblings(seq: Sequence, cache: CacheManager) -> Iterator[Sequence]:
    """Fork the other outputs once the prompt is computed: they share its blocks, copy-on-write, and then run alone."""
    while seq.siblings:
        sibling = seq.siblings[0]
        cache.fork(seq.seq_id, sibling.seq_id)
        del seq.siblings[0]
        sibling.num_computed = seq.num_computed
        sibling.cached = seq.cached
        sibling.scheduled_s = seq.scheduled_s
        yield sibling


def hand_over(seq: Sequence) -> Sequence | None:
    """Let the next output carry its siblings, from the start, when the one that carried the prompt is gone."""
    if not seq.siblings:
        return None
    heir, *rest = seq.siblings
    heir.siblings, seq.siblings = rest, []
    return heir
