"""Texts -> vectors: whole prompts through a model without its head, pooled. `LLM.embed` calls it in its own thread.

A text is computed once and forgotten, so there is no queue and no prefix cache: prompts are packed into steps, in
order, until the token budget is spent or the cache is full. An encoder's prompt is one span, a decoder's may be cut.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ridgeline.backends.step import Executable
from ridgeline.cache.layout import CacheLayout
from ridgeline.cache.manager import CacheManager
from ridgeline.core.errors import ContextLengthError
from ridgeline.core.step import Span, StepPlan
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.batch import build_batch
from ridgeline.weights.pooling import PoolingKind

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the outputs of a text's tokens become one vector; `normalize`: divided by its length."""

    kind: PoolingKind
    normalize: bool = True

    def rows(self, start: int, end: int, num_tokens: int) -> int:
        """How many of the last tokens of a span `start .. end` are wanted, of a text of `num_tokens`."""
        if self.kind == "last":
            return int(end == num_tokens)
        return end - start if self.kind == "mean" or start == 0 else 0


@dataclass(slots=True)
class _Text:
    index: int
    token_ids: Sequence[int]
    computed: int = 0
    parts: list[Vector] = field(default_factory=list[Vector])  # [rows, H] of the spans so far


class Embedder:
    """Runs prompts over an executable whose result is the last layer's output. `whole`: a prompt is one span."""

    def __init__(self, executable: Executable, layout: CacheLayout, max_batched_tokens: int, *, whole: bool) -> None:
        self._executable = executable
        self._layout = layout
        self._cache = CacheManager(layout, prefix_caching=False)
        self._budget = max_batched_tokens
        self._whole = whole
        self._steps = 0

    def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> list[Vector]:
        """A float32 vector [H] for each prompt, in order. Raises ContextLengthError for an encoder's prompt that is
        longer than a step."""
        for prompt in prompts:
            if self._whole and len(prompt) > self._budget:
                raise ContextLengthError(
                    f"this model sees a text as a whole: {len(prompt)} tokens, and a step has {self._budget}; "
                    "raise max_num_batched_tokens"
                )
        waiting = deque(_Text(index, prompt) for index, prompt in enumerate(prompts))
        running: list[_Text] = []
        vectors: list[Vector] = [np.empty(0, dtype=np.float32)] * len(prompts)
        try:
            while waiting or running:
                self._step(waiting, running, pooling)
                for text in [text for text in running if text.computed == len(text.token_ids)]:
                    vectors[text.index] = _pooled(np.concatenate(text.parts), pooling)
                    running.remove(text)
                    self._cache.release(text.index)
        finally:
            for text in running:
                self._cache.release(text.index)
        return vectors

    def _step(self, waiting: deque[_Text], running: list[_Text], pooling: Pooling) -> None:
        """Computes as many tokens as fit, of the running texts first."""
        budget, chosen = self._budget, [(text, self._end(text, self._budget)) for text in running]
        budget -= sum(end - text.computed for text, end in chosen)
        while waiting and budget > 0 and self._cache.can_admit(waiting[0].token_ids):
            end = self._end(waiting[0], budget)
            if end == 0:
                break
            text = waiting.popleft()
            self._cache.admit(text.index, text.token_ids)
            running.append(text)
            chosen.append((text, end))
            budget -= end
        spans: list[Span] = []
        for text, end in chosen:
            made = self._cache.reserve(text.index, end)
            assert made == [], "an admitted text has room, and shares no block"
            num_rows = pooling.rows(text.computed, end, len(text.token_ids))
            tokens = text.token_ids[text.computed : end]
            spans.append(Span(text.index, text.computed, tokens, num_rows, mutual=len(tokens) if self._whole else 1))
        self._run(spans, [text for text, _ in chosen])

    def _end(self, text: _Text, budget: int) -> int:
        """How far `text` gets with `budget` tokens; 0 where it must wait."""
        end = min(text.computed + budget, len(text.token_ids))
        return 0 if self._whole and end < len(text.token_ids) else end

    def _run(self, spans: Sequence[Span], texts: Sequence[_Text]) -> None:
        tables = tuple(zip(*(self._cache.tables(text.index) for text in texts), strict=True))
        self._steps += 1
        plan = StepPlan(self._steps, tuple(spans), tables, copies=(), samples=())
        output = self._executable.run(build_batch(plan, self._layout, Sampler().draw_rows(())))
        rows_RH = output.logits_RV.float().numpy()
        begin = 0
        for span, text in zip(spans, texts, strict=True):
            text.parts.append(rows_RH[begin : begin + span.num_logit_rows])
            begin += span.num_logit_rows
            text.computed = span.end
            self._cache.commit(text.index, text.token_ids, span.end)


def _pooled(rows_TH: Vector, pooling: Pooling) -> Vector:
    match pooling.kind:
        case "last":
            vector = rows_TH[-1]
        case "first":
            vector = rows_TH[0]
        case "mean":
            vector = rows_TH.mean(axis=0, dtype=np.float64).astype(np.float32)
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if pooling.normalize and length > 0 else np.array(vector)
