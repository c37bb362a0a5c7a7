"""Decode steps that follow one another: the same sequences, each one token on, without asking again who computes what.

What such steps share is kept over them, and what a step says of its sequences is made for those who look. The cache is
told where something of it changes, and of the rest when the steps stop. Called by the scheduler, for strategies that
take one token at a time. No torch, no clock.
"""

import math
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
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
    """Items that are made when somebody looks at one."""

    __slots__ = ("_first", "_made", "_shift")

    def __init__(self, first: Items[_Item], shift: int) -> None:
        """Stand for `first` with every sequence `shift` tokens on."""
        self._first, self._shift = first, shift
        self._made: tuple[_Item, ...] | None = None

    def __len__(self) -> int:
        return len(self._first)

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def _all(self) -> tuple[_Item, ...]:
        if self._made is None:
            self._made = tuple(self._make())
        return self._made

    @abstractmethod
    def _make(self) -> Iterable[_Item]: ...


class _Spans(_Later[Span]):
    """Spans of the tokens `token_ids`, one each, which the step `pending` samples if it is not 0."""

    __slots__ = ("pending", "token_ids")

    def __init__(self, first: Items[Span], shift: int, token_ids: Items[int], pending: int) -> None:
        super().__init__(first, shift)
        self.token_ids, self.pending = token_ids, pending

    def _make(self) -> Iterable[Span]:
        shift, pending = self._shift, self.pending
        for span, token_id in zip(self._first, self.token_ids):
            yield _new(Span, (span[0], span[1] + shift, (token_id,), *span[3:-1], pending))


class _Rows(_Later[SampleRow]):
    """Rows that nothing but their parameters, seeds and numbers decides."""

    __slots__ = ()

    def _make(self) -> Iterable[SampleRow]:
        shift = self._shift
        for row in self._first:
            yield _new(SampleRow, (*row[:4], row[4] + shift, row[5], (), (), (), None, None, False))


def token_of_each(spans: Items[Span]) -> Items[int]:
    """Return the tokens of spans that have one each."""
    return spans.token_ids if isinstance(spans, _Spans) else [span.token_ids[0] for span in spans]


def is_decode(plan: StepPlan, running: Items[Sequence]) -> bool:
    """Return whether the plan is one token, and one sample row, of every running sequence in their order.

    Not where tokens are taken from a log: the step after it has none.
    """
    return (
        len(plan.spans) == len(plan.samples) == len(running)
        and not plan.prompt_rows
        and not plan.vector_rows
        and not any(table.num_logged for tables in plan.tables for table in tables)
        and all(
            len(span.token_ids) == 1 == span.num_logit_rows and span.seq_id == row.seq_id == seq.seq_id
            for span, row, seq in zip(plan.spans, plan.samples, running)
        )
    )


def may_chain(seq: Sequence, num_pending: int, max_model_len: int) -> bool:
    """Return whether a sequence goes on for sure after `num_pending` tokens in flight, and its next one may be sampled
    by what is known without them."""
    return (
        not _waits_for_tokens(seq)
        and seq.num_output + num_pending < seq.request.max_tokens
        and len(seq.token_ids) + num_pending < max_model_len
    )


class DecodeRun:
    """The steps behind `first`, a decode step of all `running`, numbered from 1.

    Between two blocks of a sequence only numbers of tokens change, so `cache.commit` may wait for the places where more
    does: what the cache knows of a sequence lags behind it until then. At most `depth` plans are in flight.
    """

    def __init__(
        self, first: StepPlan, running: tuple[Sequence, ...], cache: CacheManager, depth: int, max_model_len: int
    ) -> None:
        self.seqs = running
        self.flights: deque[StepPlan] = deque()  # behind the first, those not committed
        self.num_planned = self.num_landed = 0  # behind the first
        self._first = self._last = first
        self._cache, self._depth, self._max_model_len = cache, depth, max_model_len

    def _begin(self) -> None:
        """Find out what holds for all steps to come."""
        seqs, first, size = self.seqs, self._first, self._cache.layout.block_size
        self.token_ids = [seq.token_ids for seq in seqs]
        self.requests, self.indices = [seq.request for seq in seqs], [seq.index for seq in seqs]
        self._ends = frozenset[int]().union(*[seq.request.stop_ids for seq in seqs])
        self._grammars = [seq.grammar for seq in seqs if seq.grammar is not None]
        self._begins: dict[int, list[int]] = defaultdict(list)  # by number % block size: whose token begins a block
        self._changes: dict[int, list[int]] = defaultdict(list)  # the same: of whom the cache changes at the commit
        self._changed: list[int] = []  # since the last plan
        self._pending = [PENDING] * len(seqs)
        plain_from, last = 0.0, math.inf
        for index, (seq, span, row) in enumerate(zip(seqs, first.spans, first.samples)):
            end = span.start + 1
            self._cache.reserve(seq.seq_id, -(-end // size) * size)  # of a block that it has
            self._begins[-span.start % size].append(index)
            for offset in self._cache.changing_offsets:
                self._changes[(offset - end) % size].append(index)
            waits, num_output = _waits_for_tokens(seq), row.num_output + 1
            plain_from = math.inf if waits else max(plain_from, row.params.min_tokens - num_output + 2)
            last = -1 if waits else min(last, seq.request.max_tokens - num_output, self._max_model_len - end - 1)
        self._plain_from = plain_from  # the first step whose rows, and those of the one before, need only their numbers
        self._certain = last  # the step at which the first one ends by length; -1: each has to be looked at

    def goes_on(self) -> bool:
        """Tell whether all sequences are sure to go on behind what is in flight."""
        return self.num_planned < self._certain

    def plan(
        self, step: int, head_waits: WaitReason | None, copies: list[BlockCopy], *, chain: bool
    ) -> StepPlan | None:
        """Plan one more token of each sequence, as `step`.

        `chain`: the last plan is in flight, and samples the tokens that this one computes. None where blocks lack or a
        grammar gave up; `copies` gets what has to be copied for those that did get a block.
        """
        if not self.num_planned:
            self._begin()
        if self._grammars and not all(grammar.is_sound for grammar in self._grammars):
            return None  # whose grammar gave up is told so where a whole step is planned
        number, last, cache = self.num_planned + 1, self._last, self._cache
        size = cache.layout.block_size
        begins = self._begins.get(number % size, ())
        for index in begins:
            copied = cache.reserve(self.seqs[index].seq_id, self._first.spans[index].start + number + size)
            if copied is None:
                return None
            copies += copied
        changed = range(len(self.seqs)) if number <= self._depth else {*begins, *self._changed}
        tables = self._tables(changed) if changed else last.tables
        self._changed.clear()
        token_ids = self._pending if chain else [known[-1] for known in self.token_ids]
        spans = _Spans(self._first.spans, number, token_ids, last.step if chain else 0)
        follows = 0 if copies or last.copies else last.step
        if number >= self._plain_from:
            rows: Items[SampleRow] = _Rows(self._first.samples, number)
        else:
            rows, is_alike = self._rows(number)
            follows = follows if is_alike else 0
        decided = _DECISIONS[head_waits]
        plan = StepPlan(step, spans, tables, tuple(copies), rows, decisions=decided, follows=follows)
        self._last, self.num_planned = plan, number
        self.flights.append(plan)
        return plan

    def land(self) -> Items[int]:
        """Take in that the oldest plan in flight is committed now; return of whose sequences the cache changes."""
        self.flights.popleft()
        self.num_landed += 1
        changes = self._changes.get(self.num_landed % self._cache.layout.block_size, ())
        self._changed += changes
        return changes

    def may_end(self, token_ids: Items[int]) -> bool:
        """Tell whether a sequence may end with the tokens that have landed."""
        return self.num_landed >= self._certain or not self._ends.isdisjoint(token_ids)

    def _rows(self, number: int) -> tuple[list[SampleRow], bool]:
        """Return the rows of a step that needs more than numbers, and whether they are sampled by the rules of the
        step before."""
        rows: list[SampleRow] = []
        is_alike = True
        for seq, row in zip(self.seqs, self._first.samples):
            num_output, params = row.num_output + number, row.params
            if num_output <= params.min_tokens or params.needs_history:
                is_alike = False
                rows.append(sample_row(seq, row.row, num_output))
            else:
                allowed = None if seq.grammar is None else seq.grammar.mask()
                rows.append(_new(SampleRow, (*row[:4], num_output, row[5], (), (), (), allowed, None, False)))
        return rows, is_alike

    def _tables(self, indices: Iterable[int]) -> tuple[tuple[BlockTable, ...], ...]:
        """Return the tables [group][span] of the last plan with those of some sequences looked up."""
        last = self._last.tables
        found = [(index, self._cache.tables(self.seqs[index].seq_id)) for index in indices]
        moved = [(index, new) for index, new in found if any(map(is_not, new, [tables[index] for tables in last]))]
        if not moved:
            return last
        groups = [list(tables) for tables in last]
        for index, new in moved:
            for group, table in zip(groups, new, strict=True):
                group[index] = table
        return tuple(map(tuple, groups))


def _waits_for_tokens(seq: Sequence) -> bool:
    """Tell whether what a sequence samples next hangs on the token before it."""
    return seq.grammar is not None or seq.request.params.needs_history
