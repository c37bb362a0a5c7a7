"""StepPlan -> StepBatch: the plan as the flat arrays that backends take. numpy only, no decisions.

Called by executors for every step, so what a step shares with the one before it is not made again.
"""

from itertools import chain
from operator import is_

import numpy as np

from ridgeline.backends.step import DrawRows, GroupStep, IntArray, StepBatch
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.step import BlockTable, StepPlan


class BatchBuilder:
    """Lays out the plans of one executor. A batch is good until the next one is built."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._last: tuple[StepPlan, StepBatch] | None = None

    def build(self, plan: StepPlan, draws: DrawRows) -> StepBatch:
        """`build_batch`, or the last batch with its arrays one token on, where that is all that has changed."""
        if self._last is not None and self._last[1].draws is draws and self._goes_on(self._last[0], plan):
            batch = self._last[1]
            batch.token_ids_T[:] = [span.token_ids[0] for span in plan.spans]
            np.add(batch.positions_T, 1, out=batch.positions_T)
            np.add(batch.kv_length_S, 1, out=batch.kv_length_S)
            for kind, step in zip(self._layout.groups, batch.groups, strict=True):
                if kind.kind != "recurrent":
                    np.add(step.write_slots_T, 1, out=step.write_slots_T)
        else:
            batch = build_batch(plan, self._layout, draws)
        self._last = plan, batch
        return batch

    def _goes_on(self, last: StepPlan, plan: StepPlan) -> bool:
        """Whether the spans are the next token of each of the last plan's, in the same blocks."""
        return (
            not plan.copies
            and not last.copies
            and len(plan.spans) == len(last.spans)
            and all(
                span.seq_id == before.seq_id
                and span.start == before.start + 1
                and span.start % self._layout.block_size
                and len(span.token_ids) == len(before.token_ids) == 1
                and span.num_logit_rows == before.num_logit_rows
                and span.mutual == before.mutual
                and span.adapter == before.adapter
                for span, before in zip(plan.spans, last.spans)
            )
            and all(map(is_, chain.from_iterable(plan.tables), chain.from_iterable(last.tables)))
        )


def build_batch(plan: StepPlan, layout: CacheLayout, draws: DrawRows) -> StepBatch:
    """Lays the plan's spans end to end; see StepBatch for shapes."""
    lengths_S = np.asarray([span.num_tokens for span in plan.spans], dtype=np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    positions_T = np.concatenate([np.arange(span.start, span.end) for span in plan.spans])
    rows_R = np.concatenate(
        [
            np.arange(start + span.num_tokens - span.num_logit_rows, start + span.num_tokens)
            for span, start in zip(plan.spans, starts_S.tolist(), strict=True)
        ]
    )
    span_of_T = np.repeat(np.arange(len(plan.spans)), lengths_S)
    return StepBatch(
        token_ids_T=np.concatenate([np.asarray(span.token_ids, dtype=np.int64) for span in plan.spans]),
        positions_T=positions_T,
        logit_rows_R=rows_R,
        span_start_S=starts_S,
        span_length_S=lengths_S,
        kv_length_S=np.asarray([span.end for span in plan.spans], dtype=np.int64),
        mutual_S=np.asarray([span.mutual for span in plan.spans], dtype=np.int64),
        groups=[
            _state_step(tables, span_of_T)
            if group.kind == "recurrent"
            else _group_step(tables, positions_T, span_of_T, layout.block_size)
            for group, tables in zip(layout.groups, plan.tables, strict=True)
        ],
        copies=plan.copies,
        draws=draws,
        adapters_T=_adapters(plan, lengths_S),
    )


def _group_step(
    tables: tuple[BlockTable, ...], positions_T: IntArray, span_of_T: IntArray, block_size: int
) -> GroupStep:
    first_token_S = np.asarray([table.first_token for table in tables], dtype=np.int64)
    tables_SB = np.zeros((len(tables), max(len(table.blocks) for table in tables)), dtype=np.int64)
    for row, table in zip(tables_SB, tables, strict=True):
        row[: len(table.blocks)] = table.blocks
    offsets_T = positions_T - first_token_S[span_of_T]
    blocks_T = tables_SB[span_of_T, offsets_T // block_size]
    return GroupStep(blocks_T * block_size + offsets_T % block_size, tables_SB, first_token_S)


def _state_step(tables: tuple[BlockTable, ...], span_of_T: IntArray) -> GroupStep:
    """Of a recurrent group: a table's only block is the state that its span reads and writes."""
    tables_SB = np.asarray([table.blocks for table in tables], dtype=np.int64)
    return GroupStep(tables_SB[span_of_T, 0], tables_SB, np.zeros(len(tables), dtype=np.int64))


def _adapters(plan: StepPlan, lengths_S: IntArray) -> IntArray | None:
    if not any(span.adapter for span in plan.spans):
        return None
    return np.repeat(np.asarray([span.adapter for span in plan.spans], dtype=np.int64), lengths_S)
