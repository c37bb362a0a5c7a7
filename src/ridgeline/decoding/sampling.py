"""Sampler: from the logits of a step to its tokens and log-probabilities. The executor calls it around the model.

Of requests it holds nothing that is not made anew where it is missing. The order of processing is in the docstring of
`ridgeline.decoding`, the random draw in `draw`. Must not import engine or server.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.step import DrawRows, StepOutput
from ridgeline.core.step import PromptLogprobRow, SampledToken, SampleRow, TokenLogprob
from ridgeline.decoding.draw import draw, random_word
from ridgeline.decoding.largest import argmax, largest
from ridgeline.decoding.logprobs import token_logprobs
from ridgeline.decoding.processors import FIRST_NARROWED, Processor, load_processors
from ridgeline.decoding.processors.min_p import MinP
from ridgeline.decoding.processors.temperature import Temperature
from ridgeline.decoding.processors.top_k import TopK
from ridgeline.decoding.processors.top_p import TopP

_NARROW_K = 1024  # rows with a top_k up to this leave the vocabulary behind for their k candidates
_IN_STEP = (TopK, Temperature, MinP, TopP)  # what a backend that draws applies itself
_WIDE_ROWS = 8  # rows over the whole vocabulary at a time: bounds the scratch memory, and the cache likes it
_NOT_FINITE = "the logits of this token are not finite (NaN, +inf, or every token excluded)"
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The draws of a step, and the indices of their rows in `rows`."""

    rows: Sequence[SampleRow]
    plain: list[int]
    draws: DrawRows


class Sampler:
    """Decides the tokens of a step; one per executor."""

    def __init__(self) -> None:
        processors = load_processors()
        self._edits = tuple(p for p in processors if p.order < FIRST_NARROWED)
        self._truncations = tuple(p for p in processors if p.order >= FIRST_NARROWED)
        self._not_in_step = tuple(p for p in processors if not isinstance(p, _IN_STEP))
        self._last: _Drawing | None = None

    def draw_rows(self, rows: Sequence[SampleRow]) -> DrawRows:
        """The rows of `rows`, in their order, whose tokens a backend may draw within the step.

        Good until the next call, which gives the same object where only `num_output` differs.
        """
        last, plain = self._last, self._plain(rows)
        if last is not None and last.plain == plain and _go_on(last.rows, rows):
            last.draws.num_output[:] = [rows[i].num_output for i in plain]
            draws = last.draws
        else:
            draws = _draws([rows[i] for i in plain])
        self._last = _Drawing(rows, plain, draws)
        return draws

    def sample(
        self, output: StepOutput, rows: Sequence[SampleRow], prompt_rows: Sequence[PromptLogprobRow] = ()
    ) -> tuple[tuple[SampledToken, ...], tuple[TokenLogprob, ...]]:
        """One SampledToken per row of `rows` and one TokenLogprob per row of `prompt_rows`, in their order.

        Tokens that the backend has drawn for `draw_rows(rows)` are taken, the others decided here. The logits are not
        written to. Several rows may point at the same logit row. A row whose logits are not finite gets an `error` and
        touches no other.
        """
        token_ids = [_NO_TOKEN] * len(rows)
        if output.drawn is None:
            self._decide_all(output.logits_RV, rows, range(len(rows)), token_ids)
        else:
            plain = self._last.plain if self._last is not None and self._last.rows is rows else self._plain(rows)
            for i, token_id in zip(plain, output.drawn.tolist(), strict=True):
                token_ids[i] = token_id
            if len(plain) < len(rows):
                self._decide_all(output.logits_RV, rows, sorted(set(range(len(rows))).difference(plain)), token_ids)
        logprobs = _requested_logprobs(output.logits_RV, rows, token_ids)
        sampled = [
            SampledToken(row.seq_id, token_id, logprobs.get(i), _NOT_FINITE if token_id == _NO_TOKEN else None)
            for i, (row, token_id) in enumerate(zip(rows, token_ids))
        ]
        if not prompt_rows:
            return tuple(sampled), ()
        prompt = token_logprobs(output.logits_RV, [(row.row, row.token_id, row.num_top) for row in prompt_rows])
        return tuple(sampled), tuple(prompt)

    def _plain(self, rows: Sequence[SampleRow]) -> list[int]:
        """Indices of the rows that need nothing but their logits and the parameters of DrawRows."""
        return [i for i, row in enumerate(rows) if not any(p.uses(row) for p in self._not_in_step)]

    @torch.inference_mode()
    def _decide_all(
        self, logits_RV: Tensor, rows: Sequence[SampleRow], pending: Sequence[int], token_ids: list[int]
    ) -> None:
        """Writes the token ids of the `pending` rows whose logits are finite."""
        for group in _same_path(rows, _sound(logits_RV, rows, pending)):
            for i, token_id in zip(group, self._decide(logits_RV, [rows[i] for i in group])):
                token_ids[i] = token_id

    def _decide(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """Token ids of `rows`, all of one path; _NO_TOKEN where processing left nothing finite."""
        logits_GV = _select(logits_RV, [row.row for row in rows])
        edits = _used(self._edits, rows)
        if edits:
            logits_GV = _apply(edits, _own(logits_GV, logits_RV), rows)
        if rows[0].params.greedy:
            token_G = argmax(logits_GV)
            finite_G = logits_GV.gather(1, token_G.unsqueeze(1)).isfinite().squeeze(1)
        else:
            token_G, finite_G = self._draw(logits_GV, logits_RV, rows)
        return token_G.where(finite_G, _NO_TOKEN).tolist()

    def _draw(self, logits_GV: Tensor, logits_RV: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
        """Random tokens int64 [G] of logits whose edits are done, and whether each may be used."""
        truncations = _used(self._truncations, rows)
        token_GC = None  # token id of each column, once columns are no longer the vocabulary
        if _is_narrow(rows[0]):
            values_GC, token_GC = largest(logits_GV, max(row.params.top_k for row in rows))
            token_GC, by_id_GC = token_GC.sort(-1)
            logits_GV = values_GC.gather(1, by_id_GC)
        if truncations:
            logits_GV = _apply(truncations, _own(logits_GV, logits_RV), rows)
        column_G = draw(logits_GV, [random_word(row.seed, row.num_output) for row in rows])
        finite_G = logits_GV.amax(-1).isfinite()
        if token_GC is None:
            return column_G, finite_G
        return token_GC.gather(1, column_G.unsqueeze(1)).squeeze(1), finite_G


def _draws(rows: Sequence[SampleRow]) -> DrawRows:
    params = [row.params for row in rows]
    return DrawRows(
        logit_row=np.array([row.row for row in rows], dtype=np.int64),
        temperature=np.array([0.0 if p.greedy else p.temperature for p in params], dtype=np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], dtype=np.int32),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        seed=np.array([row.seed % 2**64 for row in rows], dtype=np.uint64),
        num_output=np.array([row.num_output for row in rows], dtype=np.uint64),
    )


def _go_on(last: Sequence[SampleRow], rows: Sequence[SampleRow]) -> bool:
    """Whether the draws of `rows` differ from those of `last` in nothing but `num_output`."""
    return len(rows) == len(last) and all(
        row.params is before.params and row.row == before.row and row.seed == before.seed
        for row, before in zip(rows, last)
    )


def _sound(logits_RV: Tensor, rows: Sequence[SampleRow], pending: Sequence[int]) -> list[int]:
    """Those of the `pending` indices whose logits are finite."""
    if not pending:
        return []
    logit_rows = sorted({rows[i].row for i in pending})
    maxima_G = _select(logits_RV, logit_rows).amax(-1)  # amax carries NaN and +inf; -inf if nothing else
    finite = dict(zip(logit_rows, maxima_G.isfinite().tolist()))
    return [i for i in pending if finite[rows[i].row]]


def _same_path(rows: Sequence[SampleRow], sound: Sequence[int]) -> list[list[int]]:
    """Indices of `sound` rows: the greedy, those with few candidates (narrow), and the rest by the handful."""
    greedy = [i for i in sound if rows[i].params.greedy]
    narrow = [i for i in sound if not rows[i].params.greedy and _is_narrow(rows[i])]
    wide = [i for i in sound if not rows[i].params.greedy and not _is_narrow(rows[i])]
    by_handful = [wide[start : start + _WIDE_ROWS] for start in range(0, len(wide), _WIDE_ROWS)]
    return [group for group in (greedy, narrow, *by_handful) if group]


def _is_narrow(row: SampleRow) -> bool:
    return 0 < row.params.top_k <= _NARROW_K


def _used(processors: Sequence[Processor], rows: Sequence[SampleRow]) -> list[Processor]:
    return [processor for processor in processors if any(processor.uses(row) for row in rows)]


def _apply(processors: Sequence[Processor], logits_GV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    for processor in processors:
        logits_GV = processor.apply(logits_GV, rows)
    return logits_GV


def _select(logits_RV: Tensor, indices: list[int]) -> Tensor:
    """The given rows; `logits_RV` itself when these are all of it, in order."""
    if indices == list(range(logits_RV.shape[0])):
        return logits_RV
    return logits_RV.index_select(0, torch.tensor(indices, device=logits_RV.device))


def _own(logits_GV: Tensor, logits_RV: Tensor) -> Tensor:
    """A tensor that may be written to: the raw logits are the caller's, and the log-probabilities still need them."""
    return logits_GV.clone() if logits_GV is logits_RV else logits_GV


def _requested_logprobs(
    logits_RV: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> dict[int, TokenLogprob]:
    """By index into `rows`, for the decided rows that ask for log-probabilities."""
    wanted = {
        i: (row.row, token_id, row.params.logprobs)
        for i, (row, token_id) in enumerate(zip(rows, token_ids))
        if row.params.logprobs is not None and token_id != _NO_TOKEN
    }
    return dict(zip(wanted, token_logprobs(logits_RV, list(wanted.values())))) if wanted else {}
