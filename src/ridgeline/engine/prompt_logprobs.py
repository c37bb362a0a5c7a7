"""Log-probabilities of a prompt's own tokens: which rows score them, and whose scores they are. For the scheduler."""

from collections.abc import Iterator

from ridgeline.core.step import PromptLogprobRow, Span, StepPlan, StepResult, TokenLogprob
from ridgeline.engine.request import Sequence


def owes_scores(seq: Sequence) -> bool:
    """Tell whether scores are owed: every prompt token but the first has one, in the first output of a request."""
    wanted = seq.request.params.prompt_logprobs is not None and seq.index == 0
    return wanted and seq.num_prompt_logprobs < len(seq.request.prompt_ids) - 1


def scoring_salt(seq: Sequence) -> str:
    """Return a salt that keeps `seq` from using cached tokens while every prompt token has to be computed."""
    return f"\0scored {seq.seq_id}" if owes_scores(seq) else ""


def scoring_rows(seq: Sequence, span: Span, first_row: int) -> Iterator[PromptLogprobRow]:
    """Yield rows: position p scores prompt token p + 1, once, also when preemption computes it again."""
    num_top = seq.request.params.prompt_logprobs
    assert num_top is not None
    for offset in range(span.num_tokens):
        target = span.start + offset + 1
        if seq.num_prompt_logprobs < target < len(seq.request.prompt_ids):
            yield PromptLogprobRow(seq.seq_id, first_row + offset, seq.token_ids[target], num_top)


def scores_by_sequence(plan: StepPlan, result: StepResult) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return the scores of a step by sequence, in the order of the prompt."""
    scores: dict[int, list[TokenLogprob]] = {}
    for row, logprob in zip(plan.prompt_rows, result.prompt_logprobs, strict=True):
        scores.setdefault(row.seq_id, []).append(logprob)
    return {seq_id: tuple(found) for seq_id, found in scores.items()}
