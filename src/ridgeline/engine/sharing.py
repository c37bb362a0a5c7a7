"""Shares of the slots: who makes way where one client has them all and another waits.

Called by the scheduler, which preempts. No clock.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items

from ridgeline.engine.request import Sequence


def making_way(
    head: Sequence, running: Items[Sequence], max_num_seqs: int, key: Callable[[Sequence], tuple[int, float, int]]
) -> list[Sequence]:
    """Return which of the `running`, sorted by `key` of priority and age, to preempt for the `head` of the queue.

    Its client's share of the slots is one part for each client that has any. Those of clients with more than that make
    way, the youngest first, if they decode: so each gains a token at least before it is preempted again. Nobody does
    for a client that asks for more than its share, or for a request of a worse priority; but what runs in the
    background does for all that does not.
    """
    held = Counter({head.request.client: 0})
    for seq in running:
        held[seq.request.client] += seq.num_slots
    excess = held.total() + head.num_slots - max_num_seqs
    share = max_num_seqs // len(held)
    leaving: list[Sequence] = []
    is_fair = held[head.request.client] + head.num_slots <= share
    for seq in running[::-1]:
        client = seq.request.client
        may_leave = seq.is_decoding and key(seq)[0] >= key(head)[0]
        yields = seq.request.background > head.request.background
        if excess > 0 and may_leave and (yields or (is_fair and held[client] - seq.num_slots >= share)):
            held[client] -= seq.num_slots
            excess -= seq.num_slots
            leaving.append(seq)
    return leaving if excess <= 0 else []
