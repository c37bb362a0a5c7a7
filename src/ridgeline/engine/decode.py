"""Decode steps that follow one another: the same sequences, each one token on, without asking again who computes what.

What such steps share is found out once, and what a step says of its sequences is made for those who look. The cache is
told where something of it changes, and of the rest when the steps stop. No torch, no clock.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from operator import is_not
from typing import Any, TypeVar, get_args

from ridgeline.cache.manager import CacheManager
from ridgeline.core.step import PENDING, BlockCopy, BlockTable, Decisions, SampleRow, Span, StepPlan, WaitReason
from ridgeline.decoding.strategy import sample_row
from ridgeline.engine.request import Sequence

# Made once: nothing else is decided in such a step.
_REASONS: tuple[WaitReason | None, ...] = (None, *get_args(WaitReason))
_DECISIONS: Mapping[WaitReason | None, Decisions] = {reason: Decisions(head_waits=reason) for reason in _REASONS}

_new = tuple.__new__  # a NamedTuple's own constructor is a call of Python
_Item = TypeVar("_Item")


class _Later(Items[_Item]):
    """Items that are made when somebody looks at one: nobody who computes a step that follows does."""

    def __init__(self, count: int, make: Callable[[], Iterable[_Item]]) -> None:
        self._count, self._make = count, make
        self._made: tuple[_Item, ...] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            self._made = tuple(self._make())
        return self._made[index]


def is_decode(plan: StepPlan, running: Items[Sequence]) -> bool:
    """Return whether the plan is one token, and one sample row, of every running sequence in their order.

    Not where tokens are taken from a log: the step after it has none. Nor with beams, which fork.
    """
    return (
        len(plan.spans) == len(plan.samples) == len(running)
        and not plan.prompt_rows
        and not plan.vector_rows
        and not any(table.num_logged for tables in plan.tables for table in tables)
        and all(
            len(span.token_ids) == 1 == span.num_logit_rows
            and span.seq_id == row.seq_id == seq.seq_id
            and seq.search is None
            for span, row, seq in zip(plan.spans, plan.samples, running)
        )
    )


def may_chain(seq: Sequence, num_pending: int, max_model_len: int) -> bool:
    """Return whether a sequence goes on after `num_pending` tokens in flight unless one of them ends it, and its next
    one may be planned without them: masks of grammars are asked for later."""
    return (
        not seq.request.params.needs_history
        and seq.num_output + num_pending < seq.request.max_tokens
        and len(seq.token_ids) + num_pending < max_model_len
    )


class DecodeRun:
    """The steps behind `first`, a decode step of all `running`, numbered from 1; at most `depth` plans are in flight.

    Between two blocks of a sequence only numbers of tokens change, so `cache.commit` waits for the places where more
    does: what the cache knows of a sequence lags behind it until then.
    """

    def __init__(
        self, first: StepPlan, running: tuple[Sequence, ...], cache: CacheManager, depth: int, max_model_len: int
    ) -> None:
        self.seqs = running
        self.flights: deque[StepPlan] = deque()  # behind the first, those not committed
        self.num_planned = self._num_landed = 0  # behind the first
        self._first = self._last = first
        self._cache, self._depth, self._max_model_len = cache, depth, max_model_len

    def _begin(self) -> None:
        """Find out what holds for all steps to come."""
        seqs, first, size = self.seqs, self._first, self._cache.layout.block_size
        self._stop_ids = frozenset[int]().union(*[seq.request.stop_ids for seq in seqs])
        self.grammars = [(seq, seq.grammar) for seq in seqs if seq.grammar is not None]
        self._begins: dict[int, list[int]] = defaultdict(list)  # by number % block size: whose token begins a block
        self._changes: dict[int, list[int]] = defaultdict(list)  # the same: of whom the cache changes at the commit
        self._changed: list[int] = []  # since the last plan
        self._pending = (PENDING,) * len(seqs)
        self._alike_from, self._certain = 0.0, math.inf
        for index, (seq, span, row) in enumerate(zip(seqs, first.spans, first.samples)):
            end, request, num_output = span.start + 1, seq.request, row.num_output + 1
            self._cache.reserve(seq.seq_id, -(-end // size) * size)  # of a block that it has
            self._begins[-span.start % size].append(index)
            for offset in self._cache.changing_offsets:
                self._changes[(offset - end) % size].append(index)
            alike_from = math.inf if request.params.needs_history else request.params.min_tokens - num_output + 2
            self._alike_from = max(self._alike_from, alike_from)  # the first step sampled by the rules of the last one
            last = min(request.max_tokens - num_output, self._max_model_len - end - 1)  # then it ends by length
            self._certain = min(self._certain, 0 if request.params.needs_history else last)

    def goes_on(self) -> bool:
        """Tell whether all sequences are sure to go on behind what is in flight, unless their tokens end them."""
        return self.num_planned < self._certain

    def plan(
        self, step: int, head_waits: WaitReason | None, copies: list[BlockCopy], *, chain: bool
    ) -> StepPlan | None:
        """Plan one more token of each sequence, as `step`.

        `chain`: the last plan is in flight, and samples the tokens that this one computes. None where blocks lack;
        `copies` gets what has to be copied for those that did get a block.
        """
        if not self.num_planned:
            self._begin()
        number, first, last, size = self.num_planned + 1, self._first, self._last, self._cache.layout.block_size
        begins = self._begins.get(number % size, ())
        for index in begins:
            copied = self._cache.reserve(self.seqs[index].seq_id, first.spans[index].start + number + size)
            if copied is None:
                return None
            copies += copied
        changed = range(len(self.seqs)) if number <= self._depth else {*begins, *self._changed}
        self._changed.clear()
        is_alike = number >= self._alike_from
        if is_alike:
            rows: Items[SampleRow] = _Later(len(self.seqs), partial(_rows, first.samples, number))
        else:
            pairs = zip(self.seqs, first.samples)
            rows = [sample_row(seq, row.row, row.num_output + number) for seq, row in pairs]
        token_ids = self._pending if chain else [seq.token_ids[-1] for seq in self.seqs]
        spans = _Later(len(token_ids), partial(_spans, first.spans, number, token_ids, last.step if chain else 0))
        follows = last.step if is_alike and not copies and not last.copies else 0
        tables = self._tables(changed, anew=len(begins) > 0)
        given = tables, tuple(copies), rows, (), (), _DECISIONS[head_waits], follows, token_ids
        self._last = plan = StepPlan(step, spans, *given)
        self.num_planned = number
        self.flights.append(plan)
        return plan

    def land(self, token_ids: Items[int]) -> tuple[Items[int], bool]:
        """Take in that the oldest plan in flight is committed now: of whose sequences the cache changes, and whether
        one may end."""
        self.flights.popleft()
        self._num_landed += 1
        changes = self._changes.get(self._num_landed % self._cache.layout.block_size, ())
        self._changed += changes
        may_end = self._num_landed >= self._certain or not self._stop_ids.isdisjoint(token_ids)
        return changes, may_end

    def _tables(self, indices: Iterable[int], *, anew: bool) -> tuple[tuple[BlockTable, ...], ...]:
        """Return the tables [group][span] of the last plan with those of some sequences looked up.

        `anew`: in another tuple in any case, as `StepPlan.follows` has it.
        """
        last = self._last.tables
        found = [(index, self._cache.tables(self.seqs[index].seq_id)) for index in indices]
        moved = [(index, new) for index, new in found if any(map(is_not, new, [tables[index] for tables in last]))]
        groups = [list(tables) for tables in last] if moved or anew else []
        for index, new in moved:
            for group, table in zip(groups, new, strict=True):
                group[index] = table
        return tuple(map(tuple, groups)) if groups else last


def _spans(first: Items[Span], shift: int, token_ids: Items[int], pending: int) -> Iterable[Span]:
    for span, token_id in zip(first, token_ids):
        yield _new(Span, (span[0], span[1] + shift, (token_id,), *span[3:-1], pending))


def _rows(first: Items[SampleRow], shift: int) -> Iterable[SampleRow]:
    for row in first:
        yield _new(SampleRow, (*row[:4], row[4] + shift, row[5], (), (), (), row[9], None, False, (), row[13]))
