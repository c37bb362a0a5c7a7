"""Ops of a native program that run on the reference backend, over the native cache.

Keys and values are read out densely, span by span. Imported only for programs that have such ops: it needs torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline import _native
from ridgeline.backends.native.settings import NativeSettings
from ridgeline.backends.reference.attention import alibi_SNQL, grouped_attention, mask_of, visible_keys_SQL
from ridgeline.backends.reference.interpreter import REFERENCE_OPS
from ridgeline.backends.reference.memory import LatentSpans
from ridgeline.backends.reference.tensors import DTYPES, as_tensor
from ridgeline.backends.step import StepBatch
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.dtypes import Array
from ridgeline.program.op import ADAPTERS, LOGIT_ROWS, POSITIONS, TOKEN_IDS, Op, Program
from ridgeline.program.ops.attention import AttentionAttrs
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
        memories: Mapping[int, tuple[_native.KvMemory, int]],
        recurrent: Mapping[int, tuple[Sequence[np.ndarray], int]],
    ) -> None:
        self._program, self._dtype, self._level, self._layout = program, DTYPES[settings.dtype], settings.level, layout
        self._memories, self._recurrent = memories, recurrent
        self._weights = {name: as_tensor(weight(name)) for op in ops for name in op.weights}

    def run(self, op: Op, rows: Sequence[np.ndarray | None], step: StepBatch) -> list[np.ndarray]:
        """Compute `op` from the rows of its inputs, None for those of the step itself; return float32 rows."""
        inputs = [
            self._step_input(name, step) if values is None else self._value(name, values)
            for name, values in zip(op.inputs, rows, strict=True)
        ]
        wide = OPSET[op.kind].float32_weights
        weights = [self._weights[name].to(torch.float32 if wide else self._dtype) for name in op.weights]
        memory = NativeMemory(self._memories, self._recurrent, self._layout, self._level, step)
        with torch.inference_mode():
            outputs = REFERENCE_OPS[op.kind](op.attrs, inputs, weights, memory)
            return [output.float().flatten(1).numpy() for output in outputs]

    def _step_input(self, name: str, step: StepBatch) -> torch.Tensor:
        arrays = {TOKEN_IDS: step.token_ids_T, POSITIONS: step.positions_T, LOGIT_ROWS: step.logit_rows_R}
        if name == ADAPTERS:
            return torch.from_numpy(step.adapters_or_none_T)
        if name in arrays:
            return torch.from_numpy(arrays[name])
        # Keys and values that went to the cache natively: attention reads them there, and here only their shape.
        return torch.empty([0, *self._dims(name)], dtype=self._dtype)

    def _value(self, name: str, rows: np.ndarray) -> torch.Tensor:
        """Copy the value into the dtype and the shape that the reference op expects."""
        is_float32 = any(OPSET[op.kind].float32_outputs and name in op.outputs for op in self._program.ops)
        value = torch.from_numpy(rows.copy()).unflatten(1, self._dims(name))
        return value.to(torch.float32 if is_float32 else self._dtype)

    def _dims(self, name: str) -> list[int]:
        return [dim for dim in self._program.shapes[name][1:] if isinstance(dim, int)]


@dataclass(frozen=True, slots=True)
class _CachedSpan:
    """Holds a span's rows of T, the float32 keys and values of its sequence, and what each query sees of them.

    For latents, `k_LKD` are the latents with their rotated keys, of one head; the values have no meaning.
    """

    rows: slice
    k_LKD: torch.Tensor
    v_LKD: torch.Tensor
    query_positions_1Q: torch.Tensor
    key_positions_1L: torch.Tensor
    visible_1QL: torch.Tensor


class NativeMemory:
    """Implements StepMemory of one step over the memory of native kernels."""

    def __init__(
        self,
        memories: Mapping[int, tuple[_native.KvMemory, int]],
        recurrent: Mapping[int, tuple[Sequence[np.ndarray], int]],
        layout: CacheLayout,
        level: str,
        step: StepBatch,
    ) -> None:
        self._memories, self._recurrent = memories, recurrent
        self._layout, self._level, self._step = layout, level, step

    def write(self, state: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        memory, group = self._memories[state]
        slots = self._step.groups[group].write_slots_T
        memory.write(self._level, slots, k_TKD.float().contiguous().numpy(), v_TKD.float().contiguous().numpy())

    def attend(
        self,
        attrs: AttentionAttrs,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty_like(q_TND)
        for cached in self._cached_spans(attrs.state, attrs.window):
            keys, values = (x.to(q_TND.dtype).transpose(0, 1)[None] for x in (cached.k_LKD, cached.v_LKD))
            q, mask = q_TND[cached.rows][None], mask_of(cached.visible_1QL, q_TND.dtype)
            bias = alibi_SNQL(attrs.alibi_slopes, cached.query_positions_1Q, cached.key_positions_1L)
            out[cached.rows] = grouped_attention(q, keys, values, mask, attrs.scale, attrs.softcap, bias, sinks_N)[0]
        return out

    def write_latent(self, state: int, entries_TE: torch.Tensor) -> None:
        self.write(state, entries_TE[:, None], entries_TE[:, None])

    def latents(self, state: int, dtype: torch.dtype) -> Iterable[LatentSpans]:
        for cached in self._cached_spans(state, None):
            rows = torch.arange(cached.rows.start, cached.rows.stop)[None]
            yield LatentSpans(rows, cached.k_LKD[None, :, 0].to(dtype), mask_of(cached.visible_1QL, dtype))

    def _cached_spans(self, state: int, window: int | None) -> Iterator["_CachedSpan"]:
        """Yield what the cache holds for each span."""
        step = self._step
        memory, group = self._memories[state]
        size = self._layout.block_size
        tables = step.groups[group]
        for span, rows in enumerate(self.spans()):
            positions = np.arange(tables.first_token_S[span], step.kv_length_S[span])
            at = positions - tables.first_token_S[span]
            slots = tables.tables_SB[span][at // size] * size + at % size
            k, v = (np.empty((len(slots), memory.num_heads, memory.head_dim), dtype=np.float32) for _ in range(2))
            memory.read(self._level, slots, k, v)
            query_positions, key_positions = (
                torch.from_numpy(step.positions_T[rows])[None],
                torch.from_numpy(positions)[None],
            )
            visible = visible_keys_SQL(
                query_positions,
                key_positions,
                torch.from_numpy(step.kv_length_S[span : span + 1]),
                torch.from_numpy(step.bidirectional_block_S[span : span + 1]),
                window,
            )
            yield _CachedSpan(rows, torch.from_numpy(k), torch.from_numpy(v), query_positions, key_positions, visible)

    def spans(self) -> Sequence[slice]:
        step = self._step
        return [slice(start, start + length) for start, length in zip(step.span_start_S, step.span_length_S)]

    def load(self, state: int, part: int) -> torch.Tensor:
        parts, group = self._recurrent[state]
        value_S = parts[part][self._step.groups[group].tables_SB[:, 0]]
        value_S[self._step.kv_length_S == self._step.span_length_S] = 0
        return torch.from_numpy(value_S)

    def store(self, state: int, part: int, value_S: torch.Tensor) -> None:
        parts, group = self._recurrent[state]
        parts[part][self._step.groups[group].tables_SB[:, 0]] = value_S.numpy()
