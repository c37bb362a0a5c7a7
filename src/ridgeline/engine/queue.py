"""The waiting queue: sequences not yet, or no longer, in the cache, in the order in which they will be admitted."""

import bisect
from collections.abc import Iterator

from ridgeline.engine.request import Sequence


class WaitingQueue:
    """Sorted by priority, then arrival: a preempted sequence returns to where its arrival puts it, not to the end.

    First come, first served is the same order with all priorities equal, which is what `use_priority=False` makes.
    """

    def __init__(self, *, use_priority: bool) -> None:
        self._use_priority = use_priority
        self._entries: list[tuple[tuple[int, float, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._entries)

    def key(self, seq: Sequence) -> tuple[int, float, int]:
        """Return the sort key of a sequence, by which the running ones are served too."""
        return seq.order if self._use_priority else (0, *seq.order[1:])

    def push(self, seq: Sequence) -> None:
        bisect.insort(self._entries, (self.key(seq), seq), key=lambda entry: entry[0])

    def peek(self) -> Sequence | None:
        return self._entries[0][1] if self._entries else None

    def pop(self) -> Sequence:
        return self._entries.pop(0)[1]

    def remove(self, seq: Sequence) -> None:
        self._entries = [entry for entry in self._entries if entry[1] is not seq]
