"""The native cache for ops that run on the reference backend: keys and values are read out densely, span by span."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline import _native
from ridgeline.backends.reference.attention import alibi_SNQL, grouped_attention, mask_of, visible_keys_SQL
from ridgeline.backends.reference.memory import LatentSpans
from ridgeline.backends.step import StepBatch
from ridgeline.cache.layout import CacheLayout
from ridgeline.program.ops.attention import AttentionAttrs


@dataclass(frozen=True, slots=True)
class _Kept:
    """A span's rows of T, the float32 keys and values of its sequence, and what each query sees of them.

    Of latents `k_LKD` are the latents with their rotated keys, of one head; the values have no meaning.
    """

    rows: slice
    k_LKD: torch.Tensor
    v_LKD: torch.Tensor
    query_positions_1Q: torch.Tensor
    key_positions_1L: torch.Tensor
    visible_1QL: torch.Tensor


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
        self,
        attrs: AttentionAttrs,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty_like(q_TND)
        for kept in self._kept(attrs.state, attrs.window):
            keys, values = (x.to(q_TND.dtype).transpose(0, 1)[None] for x in (kept.k_LKD, kept.v_LKD))
            q, mask = q_TND[kept.rows][None], mask_of(kept.visible_1QL, q_TND.dtype)
            bias = alibi_SNQL(attrs.alibi_slopes, kept.query_positions_1Q, kept.key_positions_1L)
            out[kept.rows] = grouped_attention(q, keys, values, mask, attrs.scale, attrs.softcap, bias, sinks_N)[0]
        return out

    def write_latent(self, state: int, entries_TE: torch.Tensor) -> None:
        self.write(state, entries_TE[:, None], entries_TE[:, None])

    def latents(self, state: int, dtype: torch.dtype) -> Iterable[LatentSpans]:
        for kept in self._kept(state, None):
            rows = torch.arange(kept.rows.start, kept.rows.stop)[None]
            yield LatentSpans(rows, kept.k_LKD[None, :, 0].to(dtype), mask_of(kept.visible_1QL, dtype))

    def _kept(self, state: int, window: int | None) -> Iterator["_Kept"]:
        """What the cache holds for each span."""
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
                torch.from_numpy(step.mutual_S[span : span + 1]),
                window,
            )
            yield _Kept(rows, torch.from_numpy(k), torch.from_numpy(v), query_positions, key_positions, visible)

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
