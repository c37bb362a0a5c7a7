"""Shares of the slots: who makes way where one client, or one request of it, has them all and another waits, and how
many a client gets beside others.

Called by the scheduler, which preempts. No clock.
"""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from ridgeline.engine.request import Sequence

Key = tuple[int, float, int]

BESIDE_S = 1.0  # how long another client counts as there
OFTEN = 4  # requests in that time, from which on it does: a probe once a second costs nobody slots
ENOUGH = 0.75  # of the tokens per second of the best batch, by a smaller one that does as well
MEASURED = 64  # steps of a batch of some size, before its tokens per second are known
REMEMBERED = 16384  # steps, after which all sizes are measured again


class SlotCap:
    """Bound the slots of each client while others ask too.

    Where a step's time grows with its sequences, a batch of fewer computes as many tokens per second in shorter steps,
    and who comes beside a flood waits for the end of one and gets its own: the cap is the smallest size, found by
    halving, that has ENOUGH of the best rate. Where steps read weights the rate falls at once, and nothing is bounded.
    """

    def __init__(self) -> None:
        self._client: int | None = None  # who asked last
        self._changes_s = deque[float](maxlen=2 * OFTEN)  # when another one asked than before: to it, and from it
        self._until_s = -1.0  # until then there are several
        self._rates = defaultdict[int, deque[float]](lambda: deque(maxlen=MEASURED))  # by size's bit length
        self._num_steps = 0
        self._ended_s = math.inf  # the last step; inf: nothing ran since
        self._cap: int | None = None

    def came(self, client: int, now_s: float) -> None:
        """Note who asks."""
        if client == self._client:
            return
        self._client = client
        self._changes_s.append(now_s)
        if len(self._changes_s) == 2 * OFTEN and now_s <= self._changes_s[0] + BESIDE_S:
            self._until_s = now_s + BESIDE_S

    def slots(self, step: int, now_s: float) -> int | None:
        """Return how many slots a client may have that has any, in a step planned now; None: all."""
        return self._cap if now_s < self._until_s else None

    def observe(self, num_seqs: int, num_tokens: int, now_s: float) -> None:
        """Take in a step of so many sequences and tokens that has ended now: it took the time since the one before."""
        seconds, self._ended_s = now_s - self._ended_s, now_s if num_seqs else math.inf
        if now_s >= self._until_s or seconds < 0:
            return
        self._num_steps += 1
        if self._num_steps % REMEMBERED == 0:
            self._rates.clear()
        size = num_seqs.bit_length()
        self._rates[size].append(num_tokens / max(seconds, 1e-9))
        if self._num_steps % MEASURED or len(self._rates[size]) < MEASURED:
            return
        rates = {known: statistics.median(each) for known, each in self._rates.items() if len(each) == MEASURED}
        enough = ENOUGH * max(rates.values())
        is_bounded = self._cap is not None and self._cap < 2**size
        if rates[size] < enough or (is_bounded and size + 1 not in rates):
            self._cap = 2**size
        elif size > 1 and rates.get(size - 1, enough) >= enough:
            self._cap = 2 ** (size - 2)


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
