"""Turn texts into vectors: the whole prompt through a model without its head, pooled. No token is sampled.

A decoder's prompt may be cut into spans; an encoder's is one, in which every token sees every other.
"""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.params import PoolingParams
from ridgeline.core.step import SampleRow, Span, Vectors
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.decoding.strategy import SequenceView
from ridgeline.spec.spec import DecoderSpec


def build(spec: DecoderSpec, config: EngineConfig, clock: Clock) -> "Embed":
    return Embed(whole=spec.head is None)


class Embed(Autoregressive):
    """Strategy of models whose result is the last layer's output. `whole`: a prompt is one span."""

    one_token = False

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._sums: dict[int, Vectors] = {}  # by sequence, [H]: of the outputs so far, or the one that is wanted

    def next_span(self, view: SequenceView, max_tokens: int, *, score_all: bool) -> Span | None:
        start, request = view.num_computed, view.request
        end = min(start + max_tokens, len(request.prompt_ids))
        if self._whole and end < len(request.prompt_ids):
            return None
        tokens, num_rows = request.prompt_ids[start:end], _num_rows(view, start, end)
        block = len(tokens) if self._whole else 1
        return Span(
            view.seq_id, start, tokens, num_rows, bidirectional_block=block, pooled=True, adapter=request.adapter
        )

    def rows(self, view: SequenceView, span: Span, first_row: int) -> Sequence[SampleRow]:
        return ()

    def pool(self, view: SequenceView, span: Span, rows_RH: Vectors) -> Vectors | None:
        kind = _pooling(view).pooling
        if span.start == 0:  # also after a preemption
            self._sums.pop(view.seq_id, None)
        if len(rows_RH):
            wanted_H = {"last": rows_RH[-1], "first": rows_RH[0], "mean": rows_RH.sum(axis=0, dtype=np.float64)}[kind]
            before = self._sums.get(view.seq_id)
            self._sums[view.seq_id] = wanted_H if before is None else before + wanted_H
        if span.end < len(view.request.prompt_ids):
            return None
        vector_H = self._sums.pop(view.seq_id)
        if kind == "mean":
            vector_H = (vector_H / len(view.request.prompt_ids)).astype(np.float32)
        length = float(np.linalg.norm(vector_H))
        return vector_H / np.float32(length) if _pooling(view).normalize and length > 0 else np.array(vector_H)

    def forget(self, view: SequenceView) -> None:
        self._sums.pop(view.seq_id, None)


def _pooling(view: SequenceView) -> PoolingParams:
    assert view.request.pooling is not None, "a request to embed says how to pool"
    return view.request.pooling


def _num_rows(view: SequenceView, start: int, end: int) -> int:
    """Count how many of the last tokens of `start .. end` are wanted."""
    match _pooling(view).pooling:
        case "last":
            return int(end == len(view.request.prompt_ids))
        case "first":
            return end - start if start == 0 else 0
        case "mean":
            return end - start
