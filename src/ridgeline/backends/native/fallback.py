"""Ops of a native program that run on the reference backend, over the native cache.

Keys and values are read out densely, span by span. Imported only for programs that have such ops: it needs torch.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from ridgeline.backends.native.memory import CacheMemory
from ridgeline.backends.native.settings import NativeSettings
from ridgeline.backends.reference.attention import mask_of, visible_keys_SQL
from ridgeline.backends.reference.interpreter import REFERENCE_OPS
from ridgeline.backends.reference.memory import CachedSpans
from ridgeline.backends.reference.tensors import DTYPES, as_tensor
from ridgeline.backends.step import StepBatch
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.dtypes import Array
from ridgeline.program.op import STEP_INPUTS, Op, Program, dims_of
from ridgeline.program.opset import OPSET


class Fallback:
    """Computes single ops in torch. `weight` gives the weights of `ops`, which are cached."""

    def __init__(
        self,
        program: Program,
        ops: Sequence[Op],
        weight: Callable[[str], Array],
        settings: NativeSettings,
        layout: CacheLayout,
        cache: CacheMemory,
    ) -> None:
        self._program, self._dtype, self._level, self._layout = program, DTYPES[settings.dtype], settings.level, layout
        self._cache = cache
        self._weights = {name: as_tensor(weight(name)) for op in ops for name in op.weights}

    def run(self, op: Op, rows: Sequence[np.ndarray | None], step: StepBatch) -> list[np.ndarray]:
        """Compute `op` from the rows of its inputs, None for those of the step itself; return float32 rows."""
        inputs = [
            self._step_input(name, step) if values is None else self._value(name, values)
            for name, values in zip(op.inputs, rows, strict=True)
        ]
        wide = OPSET[op.kind].float32_weights
        weights = [self._weights[name].to(torch.float32 if wide else self._dtype) for name in op.weights]
        memory = NativeMemory(self._cache, self._layout, self._level, step)
        with torch.inference_mode():
            outputs = REFERENCE_OPS[op.kind](op.attrs, inputs, weights, memory)
            return [output.float().flatten(1).numpy() for output in outputs]

    def _step_input(self, name: str, step: StepBatch) -> torch.Tensor:
        if name in STEP_INPUTS:
            return torch.from_numpy(step.inputs()[name])
        # Keys and values that went to the cache natively: attention reads them there, and here only their shape.
        return torch.empty([0, *dims_of(self._program.shapes[name])], dtype=self._dtype)

    def _value(self, name: str, rows: np.ndarray) -> torch.Tensor:
        """Copy the value into the dtype and the shape that the reference op expects."""
        is_float32 = any(OPSET[op.kind].float32_outputs and name in op.outputs for op in self._program.ops)
        value = torch.from_numpy(rows.copy()).unflatten(1, dims_of(self._program.shapes[name]))
        return value.to(torch.float32 if is_float32 else self._dtype)


class NativeMemory:
    """Implements StepMemory of one step over the memory of native kernels."""

    def __init__(self, cache: CacheMemory, layout: CacheLayout, level: str, step: StepBatch) -> None:
        self._cache, self._layout, self._level, self._step = cache, layout, level, step

    def write(self, state: int, *entries_TKD: torch.Tensor) -> None:
        memory, group = self._cache.kv[state]
        k, v = entries_TKD if len(entries_TKD) == 2 else entries_TKD * 2  # of latents the values have no meaning
        slots = self._step.groups[group].write_slots_T
        memory.write(self._level, slots, k.float().contiguous().numpy(), v.float().contiguous().numpy())

    def cached(self, state: int, dtype: torch.dtype, window: int | None = None) -> Iterable[CachedSpans]:
        """Yield what the cache holds for each span."""
        step, size = self._step, self._layout.block_size
        memory, group = self._cache.kv[state]
        tables = step.groups[group]
        for span, rows in enumerate(self.spans()):
            positions = np.arange(tables.first_token_S[span], step.kv_length_S[span])
            at = positions - tables.first_token_S[span]
            slots = tables.tables_SB[span][at // size] * size + at % size
            entries = tuple(np.empty((len(slots), memory.num_heads, memory.head_dim), dtype=np.float32) for _ in "kv")
            memory.read(self._level, slots, *entries)
            k_SKLD, v_SKLD = (torch.from_numpy(each).to(dtype).transpose(0, 1)[None] for each in entries)
            rows_SQ = torch.arange(rows.start, rows.stop)[None]
            queries_SQ, keys_SL = torch.from_numpy(step.positions_T)[rows_SQ], torch.from_numpy(positions)[None]
            lengths, blocks = (
                torch.from_numpy(x[span : span + 1]) for x in (step.kv_length_S, step.bidirectional_block_S)
            )
            mask = mask_of(visible_keys_SQL(queries_SQ, keys_SL, lengths, blocks, window), dtype)
            yield CachedSpans(rows_SQ, (k_SKLD, v_SKLD), queries_SQ, keys_SL, mask)

    def spans(self) -> Sequence[slice]:
        return self._step.spans()

    def load(self, state: int, part: int) -> torch.Tensor:
        parts, group = self._cache.recurrent[state]
        value_S = parts[part][self._step.groups[group].tables_SB[:, 0]]
        value_S[self._step.kv_length_S == self._step.span_length_S] = 0
        return torch.from_numpy(value_S)

    def store(self, state: int, part: int, value_S: torch.Tensor) -> None:
        parts, group = self._cache.recurrent[state]
        parts[part][self._step.groups[group].tables_SB[:, 0]] = value_S.numpy()
