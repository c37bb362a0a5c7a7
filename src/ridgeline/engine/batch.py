"""StepPlan -> StepBatch: the plan as the flat arrays that backends take. numpy only, no decisions.

Called by executors for every step, so what a step shares with one a little before it is not made again.
"""

from collections import OrderedDict
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np

from ridgeline.backends.step import GroupStep, IntArray, SamplingMetadata, StepBatch, StepShape
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.step import BlockTable, Span, StepPlan
from ridgeline.decoding.request import SLOTS

MAX_LAID = 64  # shapes whose arrays are cached: drafts make steps of a few shapes take turns, between those of prompts
TABLE_ROOM = 8  # tables have room for a multiple of this many blocks, so that few steps make them longer
Echoes = list[tuple[int, int]]  # tokens of the step that are stored a second time, and the span that finds them there
_SAMPLING_COLUMNS = tuple(field.name for field in fields(SamplingMetadata) if "masks" not in field.name)


@dataclass(slots=True)
class _Laid:
    """A plan and its batch, with what all plans of the same lengths share."""

    plan: StepPlan
    sampling: SamplingMetadata
    batch: StepBatch
    span_of_T: IntArray
    offset_T: IntArray  # of a token within its span
    echoes: Echoes
    ones: IntArray | None = None  # [words of the block] 1 where a word is one more with the next token
    other: StepBatch | None = None  # of the token before, which may still be computed, or of the one after


class BatchBuilder:
    """Lays out the plans of one executor.

    A batch is good until the next one is built, or the next but one if that goes on from it: others share its memory.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._laid: OrderedDict[tuple[int, ...], _Laid] = OrderedDict()  # by shape, the last one at the end
        self._last: _Laid | None = None

    def build(self, plan: StepPlan, sampling: SamplingMetadata) -> StepBatch:
        """Return the plan's spans end to end; an earlier batch, filled anew, where spans and tables are as long.

        Tables are copied: nothing of the plan is read later. `sampling` that are the last ones differ in `num_output`.
        Masks have their room; what they allow is written later.
        """
        last = self._last
        moved_on = last is not None and self.goes_on(plan) and sampling is last.sampling and self._move_on(last, plan)
        if last is None or not moved_on:
            before = None
            plan, echoes = _unfolded(plan, self._layout.block_size)
            num_tokens = sum([len(span.token_ids) for span in plan.spans])
            shape = len(plan.spans), len(plan.samples), num_tokens, *self._widths(plan)
            last = self._laid.pop(shape, None)
            if last is not None and self._is_as_long(last, plan, sampling, echoes):
                before = last.plan
            else:
                last = self._lay_out(plan, sampling, echoes)
                if len(self._laid) == MAX_LAID:
                    self._laid.popitem(last=False)
            self._last = self._laid[shape] = last
            self._fill(last, plan, before)
            # metadata that were written here already differ in that column alone
            for name in ("num_output",) if before is not None and last.sampling is sampling else _SAMPLING_COLUMNS:
                getattr(last.batch.sampling, name)[:] = getattr(sampling, name)
        last.plan, last.sampling = plan, sampling
        return last.batch

    def goes_on(self, plan: StepPlan) -> bool:
        """Return whether the plan follows the one that was built last."""
        return self._last is not None and plan.follows == self._last.plan.step

    def _move_on(self, last: _Laid, plan: StepPlan) -> bool:
        """Make of the last batch that of the next token of every span; False, with nothing done, if it has no room."""
        before = last.plan
        moved = plan.tables is not before.tables
        if moved and self._widths(plan) != tuple(group.tables_SB.shape[1] for group in last.batch.groups):
            return False
        if last.ones is None or last.other is None:
            last.ones, last.other = self._ones(last.batch.block), StepBatch.view(last.batch.block.copy())
        end = len(last.ones) - last.batch.sampling.masks_MW.size - len(last.batch.echo_rows_E)  # masks come later
        np.add(last.batch.block[:end], last.ones[:end], out=last.other.block[:end])
        batch, last.other = last.other, last.batch
        last.batch = batch
        batch.token_ids_T[:] = plan.token_ids
        if moved:
            for index in range(len(batch.groups)):
                self._move_tables(index, last, plan, before)
        return True

    def _ones(self, block: IntArray) -> IntArray:
        """Return what a decode step adds to the words of `block`, of the step before."""
        ones = block.copy()
        batch = StepBatch.view(ones)
        ones[:] = 0
        for array in (batch.positions_T, batch.kv_length_S, batch.sampling.num_output):
            array[:] = 1
        for layout, group in zip(self._layout.groups, batch.groups):
            group.write_slots_T[:] = layout.kind != "recurrent"
        return ones

    def _is_as_long(self, last: _Laid, plan: StepPlan, sampling: SamplingMetadata, echoes: Echoes) -> bool:
        """Return whether a plan of the same shape has arrays as large as the last one's, and spans as long."""
        before = last.plan
        return (
            len(plan.copies) == len(before.copies)
            and len(sampling.logit_row) == len(last.sampling.logit_row)
            and echoes == last.echoes
            and sampling.masks_MW.shape == last.sampling.masks_MW.shape
            and all(map(_same_lengths, plan.spans, before.spans))
        )

    def _widths(self, plan: StepPlan) -> tuple[int, ...]:
        longest = [max([len(table.blocks) for table in tables]) for tables in plan.tables]
        groups = zip(self._layout.groups, longest, strict=True)
        return tuple([1 if group.kind == "recurrent" else -(-n // TABLE_ROOM) * TABLE_ROOM for group, n in groups])

    def _lay_out(self, plan: StepPlan, sampling: SamplingMetadata, echoes: Echoes) -> _Laid:
        """Return arrays for the plan, with everything in them that only its lengths decide."""
        spans = plan.spans
        lengths_S = np.asarray([span.num_tokens for span in spans], dtype=np.int64)
        starts_S = np.cumsum(lengths_S) - lengths_S
        span_of_T = np.repeat(np.arange(len(spans)), lengths_S)
        shape = StepShape(
            num_tokens=len(span_of_T),
            num_spans=len(spans),
            num_rows=sum(span.num_logit_rows for span in spans),
            num_sample_rows=len(sampling.logit_row),
            num_copies=len(plan.copies),
            has_adapters=any(span.adapter for span in spans),
            table_widths=self._widths(plan),
            masks=sampling.masks_MW.shape,
            num_echoes=len(echoes),
        )
        batch = StepBatch.lay_out(np.empty(shape.num_words, dtype=np.int64), shape)
        batch.span_start_S[:] = starts_S
        batch.span_length_S[:] = lengths_S
        batch.bidirectional_block_S[:] = [span.bidirectional_block for span in spans]
        ends = zip((starts_S + lengths_S).tolist(), spans)
        batch.logit_rows_R[:] = np.concatenate([np.arange(end - span.num_logit_rows, end) for end, span in ends])
        if batch.adapters_T is not None:
            batch.adapters_T[:] = np.asarray([span.adapter % SLOTS for span in spans])[span_of_T]
        batch.echo_rows_E[:] = [row for row, _ in echoes]
        return _Laid(plan, sampling, batch, span_of_T, np.arange(len(span_of_T)) - starts_S[span_of_T], echoes)

    def _fill(self, laid: _Laid, plan: StepPlan, before: StepPlan | None) -> None:
        """Write what differs between plans of the same lengths; `before` is the plan that was written last, if any."""
        batch, spans = laid.batch, plan.spans
        if len(spans) == 1:
            batch.token_ids_T[:] = spans[0].token_ids
            batch.kv_length_S[0] = spans[0].start + len(batch.token_ids_T)
            np.add(laid.offset_T, spans[0].start, out=batch.positions_T)
        else:
            batch.token_ids_T[:] = [*chain.from_iterable([span.token_ids for span in spans])]
            starts_S = np.asarray([span.start for span in spans], dtype=np.int64)
            np.add(starts_S, batch.span_length_S, out=batch.kv_length_S)
            np.add(starts_S[laid.span_of_T], laid.offset_T, out=batch.positions_T)
        for index in range(len(batch.groups)):
            self._move_tables(index, laid, plan, before)
        if plan.copies:
            batch.copies_C3[:] = [(copy.group, copy.source, copy.target) for copy in plan.copies]

    def _move_tables(self, index: int, laid: _Laid, plan: StepPlan, before: StepPlan | None) -> None:
        """Write the tables of group `index`, of which those of `before` are written, and the slots of the positions."""
        layout, group, tables = self._layout.groups[index], laid.batch.groups[index], plan.tables[index]
        _write_tables(group, tables, None if before is None else before.tables[index])
        if layout.kind == "recurrent":
            slots_S = [-1 if span.num_optional else table.blocks[0] for span, table in zip(plan.spans, tables)]
            group.write_slots_T[:] = np.asarray(slots_S)[laid.span_of_T]
            group.first_token_S[:] = [table.num_logged for table in tables]
        else:
            positions_T, size = laid.batch.positions_T, self._layout.block_size
            first = int(positions_T[0]) - tables[0].first_token
            if len(tables) == 1 and first % size + len(positions_T) <= size:  # in one block
                np.add(laid.offset_T, tables[0].blocks[first // size] * size + first % size, out=group.write_slots_T)
            else:
                self._write_slots(group, positions_T, laid.span_of_T, group.write_slots_T)
            if laid.echoes:
                span_of_E = np.array([span for _, span in laid.echoes])
                self._write_slots(group, positions_T[laid.batch.echo_rows_E], span_of_E, group.echo_slots_E)

    def _write_slots(self, group: GroupStep, positions_T: IntArray, span_of_T: IntArray, slots_T: IntArray) -> None:
        size = self._layout.block_size
        blocks_T, offsets_T = np.divmod(positions_T - group.first_token_S[span_of_T], size)
        np.add(group.tables_SB[span_of_T, blocks_T] * size, offsets_T, out=slots_T)


def _unfolded(plan: StepPlan, block_size: int) -> tuple[StepPlan, Echoes]:
    """Return the plan with a span for every branch of a tree, and what these find of the tokens on their way.

    A branch has blocks of its own from the tree's start on, with its tokens side by side: for whatever computes it
    it is a text like any other.
    """
    if not any(span.parents for span in plan.spans):
        return plan, []
    spans: list[Span] = []
    tables: list[list[BlockTable]] = [[] for _ in plan.tables]
    echoes: Echoes = []
    row = 0
    for index, span in enumerate(plan.spans):
        for number, (begin, end, way) in enumerate(span.branches()):
            rows = end - begin if number else end - (span.num_tokens - span.num_logit_rows)
            piece = span._replace(start=span.start + len(way), token_ids=span.token_ids[begin:end], parents=())
            echoes += [(row + i, len(spans)) for i in way]
            spans.append(piece._replace(num_logit_rows=rows))
            for group, table in zip(tables, [of_spans[index] for of_spans in plan.tables]):
                if number:
                    shared = table.blocks[: (span.start - table.first_token) // block_size]
                    table = BlockTable(table.first_token, [*shared, *table.branches[number - 1]])
                group.append(table)
        row += span.num_tokens
    return plan._replace(spans=spans, tables=tuple(map(tuple, tables))), sorted(echoes)


def _same_lengths(span: Span, before: Span) -> bool:
    return (
        len(span.token_ids) == len(before.token_ids)
        and span.num_logit_rows == before.num_logit_rows
        and span.bidirectional_block == before.bidirectional_block
        and span.adapter == before.adapter
    )


def _write_tables(group: GroupStep, tables: tuple[BlockTable, ...], before: tuple[BlockTable, ...] | None) -> None:
    """Write the tables that are others than `before`."""
    group.first_token_S[:] = [table.first_token for table in tables]
    for span, table in enumerate(tables):
        if before is None or table is not before[span]:
            group.tables_SB[span, : len(table.blocks)] = table.blocks
            group.tables_SB[span, len(table.blocks) :] = 0
