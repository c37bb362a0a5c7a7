"""The program over the paged cache: what the engine runs on this backend.

A state's keys and its values are blocks of [K, block_size, D], so that a gathered sequence has its heads apart, as
attention wants them. A block is cleared when its first token is written, and one extra block at the end stays zero and
pads short tables: what an earlier sequence left, a NaN perhaps, never reaches a product.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.backends.reference.attention import grouped_attention, mask_of, visible_keys_SQL
from ridgeline.backends.reference.ops import interpret, interpret_each
from ridgeline.backends.reference.packed import MATRIX_OPS, pack_matrices
from ridgeline.backends.step import GroupStep, IntArray, StepBatch, StepOutput
from ridgeline.cache.layout import CacheLayout
from ridgeline.cost.roofline import OpTiming
from ridgeline.program.op import LOGIT_ROWS, LOGITS, POSITIONS, TOKEN_IDS, AttentionAttrs, Program
from ridgeline.program.opset import ElementBytes

MAX_BATCHED_QUERIES = 16  # spans up to this long attend together when equally long; longer ones one by one


class ReferenceExecutable:
    """A program bound to weights and to cache tensors in the dtype of the weights."""

    def __init__(self, program: Program, weights: Mapping[str, torch.Tensor], layout: CacheLayout) -> None:
        self._program, self._weights = pack_matrices(program, weights)
        self._layout = layout
        dtype = weights["embed.weight"].dtype
        self._element = ElementBytes(weight=dtype.itemsize, activation=dtype.itemsize, kv=dtype.itemsize)
        self._is_bf16 = dtype is torch.bfloat16
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._group_of: dict[int, int] = {}
        for index, group in enumerate(layout.groups):
            for state in group.states:
                heads, head_dim = program.states[state].num_heads, program.states[state].head_dim
                shape = (group.num_blocks + 1, heads, layout.block_size, head_dim)
                self._keys[state] = _blocks(shape, dtype)
                self._values[state] = _blocks(shape, dtype)
                self._group_of[state] = index

    @torch.inference_mode()
    def run(self, step: StepBatch) -> StepOutput:
        """Computes the step and updates the cache; draws no tokens."""
        values, kv = self._start(step)
        return StepOutput(interpret(self._program, self._weights, values, kv)[LOGITS])

    @torch.inference_mode()
    def timed(self, step: StepBatch) -> tuple[StepOutput, list[OpTiming]]:
        """`run`, and how long each op took."""
        values, kv = self._start(step)
        timings: list[OpTiming] = []
        since = time.perf_counter()
        for op in interpret_each(self._program, self._weights, values, kv):
            now = time.perf_counter()
            inputs = "bf16" if self._is_bf16 and op.kind in (*MATRIX_OPS, "attention") else "f32"
            timings.append(OpTiming(op.label, op.kind, (op.label,), now - since, self._element, inputs))
            since = time.perf_counter()
        return StepOutput(values[LOGITS]), timings

    def _start(self, step: StepBatch) -> tuple[dict[str, torch.Tensor], "_PagedKv"]:
        """The program's inputs and its keys and values for one step."""
        self._copy_blocks(step)
        inputs = {
            TOKEN_IDS: torch.from_numpy(step.token_ids_T),
            POSITIONS: torch.from_numpy(step.positions_T),
            LOGIT_ROWS: torch.from_numpy(step.logit_rows_R),
        }
        return inputs, _PagedKv(self._keys, self._values, self._group_of, self._layout, step)

    def _copy_blocks(self, step: StepBatch) -> None:
        for copy in step.copies:
            for state in self._layout.groups[copy.group].states:
                for memory in (self._keys[state], self._values[state]):
                    memory[copy.target] = memory[copy.source]


@dataclass(frozen=True, slots=True)
class _Writes:
    """Where the step's tokens go in one group, and the blocks that get their first token."""

    blocks_T: torch.Tensor
    offsets_T: torch.Tensor
    fresh_blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class _SpanBatch:
    """Equally long spans that attend in one call: their rows in T, their blocks, and which keys they see."""

    rows_SQ: torch.Tensor
    tables_SB: torch.Tensor
    mask_SQL: torch.Tensor

    def gather(self, memory: torch.Tensor) -> torch.Tensor:
        """Keys or values of the spans' sequences out of a state's blocks, [S, K, L, D]."""
        _, heads, size, head_dim = memory.shape
        num_seqs, num_blocks = self.tables_SB.shape
        rows_SKB = self.tables_SB[:, None] * heads + torch.arange(heads)[None, :, None]
        gathered = memory.view(-1, size * head_dim).index_select(0, rows_SKB.flatten())
        return gathered.view(num_seqs, heads, num_blocks * size, head_dim)


class _PagedKv:
    """KvAccess of one step over the cache tensors. Tables and masks are made once per window and shared by layers."""

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
        self._writes = [_writes(group, layout.block_size) for group in step.groups]
        self._batches: dict[tuple[int, int | None], list[_SpanBatch]] = {}

    def write(self, state: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        writes = self._writes[self._group_of[state]]
        for memory, entries_TKD in ((self._keys[state], k_TKD), (self._values[state], v_TKD)):
            memory[writes.fresh_blocks] = 0
            memory[writes.blocks_T, :, writes.offsets_T] = entries_TKD

    def attend(
        self, attrs: AttentionAttrs, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(q_TND)
        keys, values = self._keys[attrs.state], self._values[attrs.state]
        for batch in self._span_batches(self._group_of[attrs.state], attrs.window):
            out[batch.rows_SQ] = grouped_attention(
                q_TND[batch.rows_SQ],
                batch.gather(keys),
                batch.gather(values),
                batch.mask_SQL,
                attrs.scale,
                attrs.softcap,
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
        used_S = -(-(end_S - first_S) // size)
        tables_SB = group.tables_SB[spans, : used_S.max()]
        zero_block = self._layout.groups[index].num_blocks
        tables_SB = np.where(np.arange(used_S.max()) < used_S[:, None], tables_SB, zero_block)
        rows_SQ = step.span_start_S[spans][:, None] + np.arange(length)
        visible = visible_keys_SQL(
            torch.from_numpy(step.positions_T[rows_SQ]),
            torch.from_numpy(first_S[:, None] + np.arange(used_S.max() * size)),
            torch.from_numpy(end_S),
            torch.from_numpy(step.causal_S[spans]),
            window,
        )
        mask = mask_of(visible, self._keys[self._layout.groups[index].states[0]].dtype)
        return _SpanBatch(torch.from_numpy(rows_SQ), torch.from_numpy(tables_SB), mask)


def _blocks(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for blocks, the last one zero. The others take no physical memory before they are written."""
    memory = torch.empty(shape, dtype=dtype)
    memory[-1] = 0
    return memory


def _writes(group: GroupStep, block_size: int) -> _Writes:
    blocks_T, offsets_T = np.divmod(group.write_slots_T, block_size)
    return _Writes(torch.from_numpy(blocks_T), torch.from_numpy(offsets_T), torch.from_numpy(blocks_T[offsets_T == 0]))
