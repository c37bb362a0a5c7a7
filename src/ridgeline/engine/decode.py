"""The decode step after a decode step: every running sequence one token on, without asking again who computes what.

Called by the scheduler, for strategies that take one token at a time. No torch, no clock.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import get_args

from ridgeline.cache.manager import Advance
from ridgeline.core.step import PENDING, BlockTable, Decisions, SampleRow, Span, StepPlan, WaitReason
from ridgeline.decoding.strategy import sample_row
from ridgeline.engine.request import Sequence

# Made once: nothing else is decided in such a step.
_REASONS: tuple[WaitReason | None, ...] = (None, *get_args(WaitReason))
_DECISIONS: Mapping[WaitReason | None, Decisions] = {reason: Decisions(head_waits=reason) for reason in _REASONS}

_new = tuple.__new__  # a NamedTuple's own constructor is a call of Python, and these run once a sequence and step


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
        not seq.request.params.needs_history
        and seq.grammar is None
        and seq.num_output + num_pending < seq.request.max_tokens
        and len(seq.token_ids) + num_pending < max_model_len
    )


def next_decode(
    last: StepPlan, running: Items[Sequence], advance: Advance, step: int, head_waits: WaitReason | None, *, chain: bool
) -> StepPlan:
    """Return the plan of `step` after `last`, a decode step of `running`, for what the cache has reserved.

    `chain`: `last` is in flight, and samples the tokens that this step computes. Otherwise it is committed.
    """
    pending = last.step if chain else 0
    spans = [
        _new(Span, (span[0], span[1] + 1, (PENDING if chain else seq.token_ids[-1],), *span[3:-1], pending))
        for seq, span in zip(running, last.spans)
    ]
    rows: list[SampleRow] = []
    follows = 0 if advance.copies or last.copies else last.step
    for seq, row in zip(running, last.samples):
        params = row.params
        if not last.follows and (row.num_output < params.min_tokens or params.needs_history):
            follows = 0  # its token was not, or will not be, sampled by the same rules
            rows.append(sample_row(seq, row.row, row.num_output + 1))
        else:
            allowed = None if seq.grammar is None else seq.grammar.mask()
            rows.append(_new(SampleRow, (*row[:4], row[4] + 1, row[5], (), (), (), allowed, None, False)))
    tables, copies = _tables(last.tables, advance.tables), tuple(advance.copies)
    decisions = _DECISIONS[head_waits]
    return StepPlan(step, tuple(spans), tables, copies, tuple(rows), decisions=decisions, follows=follows)


def _tables(
    last: tuple[tuple[BlockTable, ...], ...], changed: Items[tuple[int, tuple[BlockTable, ...]]]
) -> tuple[tuple[BlockTable, ...], ...]:
    """Return the tables [group][span] of the last step with those of some spans replaced."""
    if not changed:
        return last
    groups = [list(tables) for tables in last]
    for index, tables in changed:
        for group, table in zip(groups, tables, strict=True):
            group[index] = table
    return tuple(map(tuple, groups))
