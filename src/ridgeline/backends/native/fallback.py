"""The native cache for ops that run on the reference backend: keys and values are read out densely, span by span."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ridgeline import _native
from ridgeline.backends.reference.attention import alibi_SNQL, grouped_attention, mask_of, visible_keys_SQL
from ridgeline.backends.step import StepBatch
from ridgeline.cache.layout import CacheLayout
from ridgeline.program.ops.attention import AttentionAttrs


class NativeMemory:
    """StepMemory of one step over the memory of native kernels."""

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
        self, attrs: AttentionAttrs, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        step, out = self._step, torch.empty_like(q_TND)
        memory, group = self._memories[attrs.state]
        size = self._layout.block_size
        tables = step.groups[group]
        for span, (start, length) in enumerate(zip(step.span_start_S.tolist(), step.span_length_S.tolist())):
            positions = np.arange(tables.first_token_S[span], step.kv_length_S[span])
            at = positions - tables.first_token_S[span]
            slots = tables.tables_SB[span][at // size] * size + at % size
            k, v = (np.empty((len(slots), *k_TKD.shape[1:]), dtype=np.float32) for _ in range(2))
            memory.read(self._level, slots, k, v)
            keys, values = (torch.from_numpy(x).to(q_TND.dtype).transpose(0, 1)[None] for x in (k, v))
            rows = slice(start, start + length)
            query_positions, key_positions = (
                torch.from_numpy(step.positions_T[rows])[None],
                torch.from_numpy(positions)[None],
            )
            visible = visible_keys_SQL(
                query_positions,
                key_positions,
                torch.from_numpy(step.kv_length_S[span : span + 1]),
                torch.from_numpy(step.mutual_S[span : span + 1]),
                attrs.window,
            )
            q = q_TND[rows][None]
            mask = mask_of(visible, q.dtype)
            bias = alibi_SNQL(attrs.alibi_slopes, query_positions, key_positions)
            out[rows] = grouped_attention(q, keys, values, mask, attrs.scale, attrs.softcap, bias)[0]
        return out

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
