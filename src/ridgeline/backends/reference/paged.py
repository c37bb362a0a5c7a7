"""The program over the paged cache: what the engine runs on this backend.

Slot `block * block_size + offset` of a group's states holds one token's keys and values. One extra slot at the end
stays zero and stands in for positions that a table does not have, so that stale memory never reaches a product.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.backends.reference.attention import grouped_attention, visible_keys_SQL
from ridgeline.backends.reference.ops import interpret
from ridgeline.backends.reference.packed import pack_matrices
from ridgeline.backends.step import IntArray, StepBatch
from ridgeline.cache.layout import CacheLayout
from ridgeline.program.op import LOGIT_ROWS, LOGITS, POSITIONS, TOKEN_IDS, AttentionAttrs, Program

MAX_BATCHED_QUERIES = 16  # spans up to this long attend together when equally long; longer ones one by one


class ReferenceExecutable:
    """A program bound to weights and to cache tensors in the dtype of the weights."""

    def __init__(self, program: Program, weights: Mapping[str, torch.Tensor], layout: CacheLayout) -> None:
        self._program, self._weights = pack_matrices(program, weights)
        self._layout = layout
        dtype = weights["embed.weight"].dtype
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._group_of: dict[int, int] = {}
        for index, group in enumerate(layout.groups):
            num_slots = group.num_blocks * layout.block_size + 1
            for state in group.states:
                shape = (num_slots, program.states[state].num_heads, program.states[state].head_dim)
                self._keys[state] = torch.zeros(shape, dtype=dtype)
                self._values[state] = torch.zeros(shape, dtype=dtype)
                self._group_of[state] = index

    @torch.inference_mode()
    def run(self, step: StepBatch) -> torch.Tensor:
        """Computes the step, updates the cache, and returns logits, float32 [R, V]."""
        self._copy_blocks(step)
        inputs = {
            TOKEN_IDS: torch.from_numpy(step.token_ids_T),
            POSITIONS: torch.from_numpy(step.positions_T),
            LOGIT_ROWS: torch.from_numpy(step.logit_rows_R),
        }
        kv = _PagedKv(self._keys, self._values, self._group_of, self._layout, step)
        return interpret(self._program, self._weights, inputs, kv)[LOGITS]

    def _copy_blocks(self, step: StepBatch) -> None:
        size = self._layout.block_size
        for copy in step.copies:
            for state in self._layout.groups[copy.group].states:
                for memory in (self._keys[state], self._values[state]):
                    memory[copy.target * size : (copy.target + 1) * size] = memory[
                        copy.source * size : (copy.source + 1) * size
                    ]


@dataclass(frozen=True, slots=True)
class _SpanBatch:
    """Equally long spans that attend in one call: their rows in T, and the cache slots and mask of their keys."""

    rows_SQ: torch.Tensor
    slots: torch.Tensor  # flat [S * L]
    num_keys: int
    visible_SQL: torch.Tensor


class _PagedKv:
    """KvAccess of one step over the cache tensors. Slots and masks are made once per window and shared by layers."""

    def __init__(
        self,
        keys: Mapping[int, torch.Tensor],
        values: Mapping[int, torch.Tensor],
        group_of: Mapping[int, int],
        layout: CacheLayout,
        step: StepBatch,
    ) -> None:
        self._keys = keys
        self._values = values
        self._group_of = group_of
        self._layout = layout
        self._step = step
        self._write_slots = [torch.from_numpy(group.write_slots_T) for group in step.groups]
        self._batches: dict[tuple[int, int | None], list[_SpanBatch]] = {}

    def write(self, state: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        slots = self._write_slots[self._group_of[state]]
        self._keys[state].index_copy_(0, slots, k_TKD)
        self._values[state].index_copy_(0, slots, v_TKD)

    def attend(
        self, attrs: AttentionAttrs, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(q_TND)
        keys, values = self._keys[attrs.state], self._values[attrs.state]
        for batch in self._span_batches(self._group_of[attrs.state], attrs.window):
            shape = (batch.rows_SQ.shape[0], batch.num_keys)
            k = keys.index_select(0, batch.slots).unflatten(0, shape)
            v = values.index_select(0, batch.slots).unflatten(0, shape)
            out[batch.rows_SQ] = grouped_attention(
                q_TND[batch.rows_SQ], k, v, batch.visible_SQL, attrs.scale, attrs.softcap
            )
        return out

    def _span_batches(self, group: int, window: int | None) -> list[_SpanBatch]:
        if (group, window) not in self._batches:
            lengths = self._step.span_length_S
            members: dict[tuple[int, int], list[int]] = {}
            for span, length in enumerate(lengths.tolist()):
                alone = span if length > MAX_BATCHED_QUERIES else -1
                members.setdefault((length, alone), []).append(span)
            self._batches[group, window] = [
                self._span_batch(group, np.asarray(spans), length, window) for (length, _), spans in members.items()
            ]
        return self._batches[group, window]

    def _span_batch(self, index: int, spans: IntArray, length: int, window: int | None) -> _SpanBatch:
        step, group, size = self._step, self._step.groups[index], self._layout.block_size
        first_S, end_S = group.first_token_S[spans], step.kv_length_S[spans]
        offsets_L = np.arange((end_S - first_S).max())
        key_positions_SL = first_S[:, None] + offsets_L
        slots_SL = group.tables_SB[spans][:, offsets_L // size] * size + offsets_L % size
        zero_slot = self._layout.groups[index].num_blocks * size
        slots_SL = np.where(key_positions_SL < end_S[:, None], slots_SL, zero_slot)
        rows_SQ = step.span_start_S[spans][:, None] + np.arange(length)
        visible = visible_keys_SQL(
            torch.from_numpy(step.positions_T[rows_SQ]),
            torch.from_numpy(key_positions_SL),
            torch.from_numpy(end_S),
            torch.from_numpy(step.causal_S[spans]),
            window,
        )
        return _SpanBatch(torch.from_numpy(rows_SQ), torch.from_numpy(slots_SL.ravel()), len(offsets_L), visible)
