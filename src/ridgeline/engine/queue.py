"""The waiting queue: sequences not yet, or no longer, in the cache, in the order in which they will be admitted."""

import bisect
from collections.abc import Sequence as Items

from ridgeline.engine.request import Sequence
from ridgeline.engine.sharing import Key, slots_by

BACKGROUND = 2**33  # more than priorities differ by
MAX_REMEMBERED = 10_000  # clients that wait no more


class WaitingQueue:
    """Sorted by priority; then the client goes first that was served the fewest tokens, and of its requests the one
    that has the fewest slots, then by arrival.

    Served are the tokens of what is admitted and what it generates while others wait; a client that comes starts at the
    count of the one served last, so that nobody saves up turns (virtual token counter, OSDI 2024). A preempted sequence
    returns to where its arrival puts it, whoever's it is, unless it made way for another client. With one client this
    is first come, first served.
    """

    def __init__(self, *, use_priority: bool) -> None:
        self._use_priority = use_priority
        self._waiting: dict[int, list[tuple[Key, Sequence]]] = {}  # by client, without empty lists
        self._served: dict[int, int] = {}  # tokens, by client
        self._level = 0  # what the client served last had

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def key(self, seq: Sequence) -> Key:
        """Return the sort key of a sequence, by which the running ones are served too."""
        request = seq.request
        priority = request.priority if self._use_priority else 0
        return (priority + request.background * BACKGROUND, request.arrival_s, seq.seq_id)

    def push(self, seq: Sequence) -> None:
        """Queue a sequence; a beam that waits for others stands aside until it is pushed again."""
        seq.is_aside = seq.waits
        if seq.is_aside:
            return
        client = seq.request.client
        if client not in self._waiting:
            if len(self._served) > MAX_REMEMBERED:
                self._served = {c: n for c, n in self._served.items() if c in self._waiting}
            self._waiting[client] = []
            self._served[client] = max(self._served.get(client, 0), self._level)
        bisect.insort(self._waiting[client], (self.key(seq), seq), key=lambda entry: entry[0])

    def peek(self, running: Items[Sequence] = (), cap: int | None = None) -> Sequence | None:
        """Return who is next beside those that are `running`, where `cap` bounds the slots of a client that has any."""
        clients = list(self._waiting)
        if cap is not None:
            has = slots_by(lambda seq: seq.request.client, running)
            clients = [c for c in clients if not has[c] or has[c] + self._waiting[c][0][1].num_slots <= cap]
        if not clients:
            return None
        entries = self._waiting[min(clients, key=self._rank)]
        (priority, _, _), found = entries[0]
        if not (found.request.call or found.yields) or not _is_new(found):
            return found  # nothing of its request runs, or it goes first anyway
        held = slots_by(lambda seq: seq.call, running)
        for key, seq in entries:
            if key[0] != priority or not held[found.call]:
                break
            if held[seq.call] < held[found.call]:
                found = seq
        return found

    def take(self, seq: Sequence) -> None:
        """Take out a sequence that is admitted: the one that `peek` shows."""
        client = seq.request.client
        self._level = self._served[client]
        self.charge(client, len(seq.token_ids))
        self.remove(seq)

    def charge(self, client: int, num_tokens: int) -> None:
        """Count tokens that a client was served; nobody keeps count while nobody waits."""
        if client in self._served:
            self._served[client] += num_tokens

    def charge_output(self, seq: Sequence) -> None:
        """Count what a sequence has generated since this was called last."""
        self.charge(seq.request.client, seq.num_output - seq.num_charged)
        seq.num_charged = seq.num_output

    def remove(self, seq: Sequence) -> None:
        client = seq.request.client
        entries = [entry for entry in self._waiting.get(client, ()) if entry[1] is not seq]
        if entries:
            self._waiting[client] = entries
        else:
            self._waiting.pop(client, None)
        if not self._waiting:
            self._served.clear()
            self._level = 0

    def _rank(self, client: int) -> tuple[int, bool, int, float, int]:
        """Return the sort key of a client: that of its first sequence, behind what it was served."""
        (priority, arrival_s, seq_id), seq = self._waiting[client][0]
        is_new = _is_new(seq)
        return (priority, is_new, self._served[client] if is_new else 0, arrival_s, seq_id)


def _is_new(seq: Sequence) -> bool:
    """Tell whether its turn is its client's: it has not run, or made way."""
    return seq.num_preemptions == 0 or seq.yields
