"""Shares of the slots: who makes way where one client, or one request of it, has them all and another waits.

Called by the scheduler, which preempts. No clock.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items

from ridgeline.engine.request import Sequence

Key = tuple[int, float, int]


def slots_by(party: Callable[[Sequence], int | str], running: Items[Sequence]) -> Counter[int | str]:
    """Return the slots that each party has."""
    held = Counter[int | str]()
    for seq in running:
        held[party(seq)] += seq.num_slots
    return held


def making_way(
    head: Sequence, running: Items[Sequence], max_num_seqs: int, key: Callable[[Sequence], Key]
) -> list[Sequence]:
    """Return which of the `running`, sorted by `key` of priority and age, to preempt for the `head` of the queue.

    Its client's share of the slots is one part for each client that has any. Those of clients with more than that make
    way, the youngest first, if they decode: so each gains a token at least before it is preempted again. Nobody does
    for a client that asks for more than its share, or for a request of a worse priority; but what runs in the
    background does for all that does not. A client's slots are shared among its requests in the same way.
    """
    excess = sum(seq.num_slots for seq in running) + head.num_slots - max_num_seqs
    if excess <= 0:
        return []
    own = [seq for seq in running if seq.request.client == head.request.client]
    return _leaving(head, running, excess, key, lambda seq: seq.request.client) or _leaving(
        head, own, excess, key, lambda seq: seq.call
    )


def _leaving(
    head: Sequence,
    running: Items[Sequence],
    excess: int,
    key: Callable[[Sequence], Key],
    party: Callable[[Sequence], int | str],
) -> list[Sequence]:
    """Return which of the `running` make way, where slots are parties' to share and the head lacks `excess` of them."""
    held = slots_by(party, running)
    share = (held.total() + head.num_slots - excess) // len(held.keys() | {party(head)})
    leaving: list[Sequence] = []
    is_fair = held[party(head)] + head.num_slots <= share
    for seq in running[::-1]:
        may_leave = seq.is_decoding and key(seq)[0] >= key(head)[0]
        yields = seq.request.background > head.request.background
        if excess > 0 and may_leave and (yields or (is_fair and held[party(seq)] - seq.num_slots >= share)):
            held[party(seq)] -= seq.num_slots
            excess -= seq.num_slots
            leaving.append(seq)
    return leaving if excess <= 0 else []
