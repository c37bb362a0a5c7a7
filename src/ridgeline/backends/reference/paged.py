"""The program over the paged cache: what the engine runs on this backend.

A state's keys and its values are blocks of [K, block_size, D], so that a gathered sequence has its heads apart, as
attention wants them. A block is cleared when its first token is written, and one extra block at the end stays zero and
pads short tables: what an earlier sequence left, a NaN perhaps, never reaches a product.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.reference.attention import mask_of, visible_keys_SQL
from ridgeline.backends.reference.interpreter import interpret, interpret_each
from ridgeline.backends.reference.memory import CachedSpans, InputLog
from ridgeline.backends.reference.packed import pack_matrices
from ridgeline.backends.reference.tensors import as_array, as_tensors
from ridgeline.backends.step import IntArray, StepBatch, StepOutput
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.config import Choice, KvDtype
from ridgeline.core.dtypes import Array
from ridgeline.cost.efficiency import OpTiming
from ridgeline.program.op import FEATURES, KvState, LatentState, Program, RecurrentState, State
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.program.pricing import ElementBytes
from ridgeline.quant.kv import SCALED, as_cached

MAX_BATCHED_QUERIES = 16  # spans up to this long attend together when equally long; longer ones one by one

StateMemory = tuple[Tensor, ...]
"""Blocks of one state: keys and values, latents, or the parts of a recurrent state."""
Memories = Mapping[int, StateMemory]  # by state


class ReferenceExecutable:
    """Runs a program bound to weights and to cache tensors in the dtype of the weights; of rounded values, float32."""

    def __init__(
        self, program: Program, weights: Mapping[str, Array], layout: CacheLayout, kv_dtype: KvDtype = "auto"
    ) -> None:
        self.program, self._layout = program, layout
        self.load_weights(weights)
        dtype = next((tensor.dtype for tensor in as_tensors(weights).values() if tensor.ndim > 1), torch.float32)
        self._dtype = dtype
        self._kv_dtype: KvDtype = kv_dtype
        self._element = ElementBytes(weight=dtype.itemsize, activation=dtype.itemsize, kv=dtype.itemsize)
        self._is_bf16 = dtype is torch.bfloat16
        self._memories: dict[int, StateMemory] = {}
        self._logs: dict[int, StateMemory] = {}
        self._group_of: dict[int, int] = {}
        stored = torch.float32 if kv_dtype in SCALED else dtype
        for index, group in enumerate(layout.groups):
            for state in group.states:
                size = program.states[state]
                self._memories[state] = _allocate(size, group.num_blocks + 1, layout.block_size, stored)
                self._group_of[state] = index
                if isinstance(size, RecurrentState) and group.log_rows:
                    shape = (group.num_blocks, group.log_rows)
                    self._logs[state] = tuple(torch.zeros(*shape, width) for width in size.logged)

    def load_weights(self, weights: Mapping[str, Array]) -> None:
        """Compute with these weights from the next step on; with none there is no step until there are others."""
        self._program, self._weights = (
            pack_matrices(self.program, as_tensors(weights)) if weights else (self.program, {})
        )

    @property
    def weight_bytes(self) -> int:
        """Return the size of the weights, each counted once."""
        return sum({id(weight): weight.nbytes for weight in self._weights.values()}.values())

    def adapter_factors(self, name: str) -> Array:
        return as_array(self._weights[name])

    def facts(self) -> Mapping[str, Choice]:
        return {}

    @torch.inference_mode()
    def run(self, step: StepBatch, features_TW: Array | None = None) -> StepOutput:
        """Compute the step and update the cache; sample no tokens."""
        values, memory = self._start(step, features_TW)
        return self._output(interpret(self._program, self._weights, values, memory))

    @torch.inference_mode()
    def timed(self, step: StepBatch) -> tuple[StepOutput, list[OpTiming]]:
        """Do as `run`, and return how long each op took."""
        values, memory = self._start(step)
        timings: list[OpTiming] = []
        since = time.perf_counter()
        for op in interpret_each(self._program, self._weights, values, memory):
            now = time.perf_counter()
            inputs = "bf16" if self._is_bf16 and op.kind in (*MATRIX_OPS, "attention") else "f32"
            timings.append(OpTiming(op.label, op.kind, (op.label,), now - since, self._element, inputs))
            since = time.perf_counter()
        return self._output(values), timings

    def _output(self, values: Mapping[str, Tensor]) -> StepOutput:
        taps = [values[name].float().numpy() for name in self._program.taps]
        taps_TW = np.concatenate(taps, axis=1) if taps else None
        return StepOutput(values[self._program.result].float().numpy(), taps_TW=taps_TW)

    def _start(self, step: StepBatch, features_TW: Array | None = None) -> tuple[dict[str, Tensor], "_PagedMemory"]:
        """Return the program's inputs and its keys and values for one step."""
        self._copy_blocks(step)
        inputs = {name: torch.from_numpy(array) for name, array in step.inputs().items()}
        if features_TW is not None:
            inputs[FEATURES] = torch.from_numpy(features_TW).to(self._dtype)
        return inputs, _PagedMemory(self._memories, self._logs, self._group_of, self._layout, step, self._kv_dtype)

    def _copy_blocks(self, step: StepBatch) -> None:
        for group, source, target in step.copies_C3.tolist():
            for state in self._layout.groups[group].states:
                for memory in self._memories[state]:
                    memory[target] = memory[source]


def _gather(memory: Tensor, tables_SB: Tensor) -> Tensor:
    """Gather keys or values of sequences out of a state's blocks, [S, K, L, D]."""
    _, heads, size, head_dim = memory.shape
    num_seqs, num_blocks = tables_SB.shape
    rows_SKB = tables_SB[:, None] * heads + torch.arange(heads)[None, :, None]
    gathered = memory.view(-1, size * head_dim).index_select(0, rows_SKB.flatten())
    return gathered.view(num_seqs, heads, num_blocks * size, head_dim)


class _PagedMemory:
    """StepMemory of one step over the cache tensors. Tables and masks are made once per window, for all layers."""

    def __init__(
        self,
        memories: Memories,
        logs: Memories,
        group_of: Mapping[int, int],
        layout: CacheLayout,
        step: StepBatch,
        kv_dtype: KvDtype,
    ) -> None:
        self._logs, self._kv_dtype = logs, kv_dtype
        self._memories, self._group_of, self._layout, self._step = memories, group_of, layout, step
        self._writes: dict[int, tuple[Tensor, ...]] = {}
        self._batches: dict[tuple[int, int | None], list[tuple[Tensor, CachedSpans]]] = {}

    def write(self, state: int, *entries_TKD: Tensor) -> None:
        group = self._group_of[state]
        if group not in self._writes:
            self._writes[group] = _writes(self._step, group, self._layout.block_size)
        rows_N, blocks_N, offsets_N, fresh_blocks = self._writes[group]
        for part, (memory, entries) in enumerate(zip(self._memories[state], entries_TKD, strict=True)):
            if self._kv_dtype in SCALED:
                entries = torch.from_numpy(as_cached(self._kv_dtype, entries.float().numpy(), keys=part == 0))
            memory[fresh_blocks] = 0
            memory[blocks_N, :, offsets_N] = entries[rows_N]

    def cached(self, state: int, dtype: torch.dtype, window: int | None = None) -> Iterable[CachedSpans]:
        for tables_SB, spans in self._span_batches(self._group_of[state], window):
            entries = tuple(_gather(memory, tables_SB).to(dtype) for memory in self._memories[state])
            yield replace(spans, entries=entries, mask_SQL=spans.mask_SQL.to(dtype))

    def spans(self) -> Sequence[slice]:
        return self._step.spans()

    def load(self, state: int, part: int) -> Tensor:
        value_S = self._memories[state][part][self._slots_S(state)]
        value_S[torch.from_numpy(self._step.kv_length_S == self._step.span_length_S)] = 0
        return value_S

    def store(self, state: int, part: int, value_S: Tensor) -> None:
        self._memories[state][part][self._slots_S(state)] = value_S

    def log(self, state: int, part: int) -> InputLog | None:
        if state not in self._logs:
            return None
        return InputLog(self._logs[state][part], self._step, self._step.groups[self._group_of[state]])

    def _slots_S(self, state: int) -> Tensor:
        """Return the block of each span that holds its recurrent state: its table's only one."""
        return torch.from_numpy(self._step.groups[self._group_of[state]].tables_SB[:, 0])

    def _span_batches(self, group: int, window: int | None) -> list[tuple[Tensor, CachedSpans]]:
        if (group, window) not in self._batches:
            lengths = self._step.span_length_S
            members: dict[tuple[int, int], list[int]] = {}
            for span, length in enumerate(lengths.tolist()):
                alone = span if length > MAX_BATCHED_QUERIES else -1
                members.setdefault((length, alone), []).append(span)
            batches = [(np.asarray(spans), length) for (length, _), spans in members.items()]
            self._batches[group, window] = [self._span_batch(group, *each, window) for each in batches]
        return self._batches[group, window]

    def _span_batch(self, index: int, spans: IntArray, length: int, window: int | None) -> tuple[Tensor, CachedSpans]:
        """Return the blocks of spans that attend in one call, and all else of them but what the blocks hold."""
        step, group, size = self._step, self._step.groups[index], self._layout.block_size
        first_S, end_S = group.first_token_S[spans], step.kv_length_S[spans]
        used_S = -(-(end_S - first_S) // size)
        tables_SB = group.tables_SB[spans, : used_S.max()]
        zero_block = self._layout.groups[index].num_blocks
        tables_SB = np.where(np.arange(used_S.max()) < used_S[:, None], tables_SB, zero_block)
        rows_SQ = step.span_start_S[spans][:, None] + np.arange(length)
        queries_SQ = torch.from_numpy(step.positions_T[rows_SQ])
        keys_SL = torch.from_numpy(first_S[:, None] + np.arange(used_S.max() * size))
        bidirectional_block_S = torch.from_numpy(step.bidirectional_block_S[spans])
        visible = visible_keys_SQL(queries_SQ, keys_SL, torch.from_numpy(end_S), bidirectional_block_S, window)
        mask = mask_of(visible, self._memories[self._layout.groups[index].states[0]][0].dtype)
        return torch.from_numpy(tables_SB), CachedSpans(torch.from_numpy(rows_SQ), (), queries_SQ, keys_SL, mask)


def _allocate(state: State, num_blocks: int, block_size: int, dtype: torch.dtype) -> StateMemory:
    match state:
        case KvState():
            shape = (num_blocks, state.num_heads, block_size, state.head_dim)
            return _blocks(shape, dtype), _blocks(shape, dtype)
        case LatentState():
            return (_blocks((num_blocks, 1, block_size, state.latent_dim + state.rope_dim), dtype),)
        case RecurrentState():
            return tuple(torch.zeros(num_blocks, *shape) for shape in state.parts)


def _blocks(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate blocks, the last one zero. The others take no physical memory before they are written."""
    memory = torch.empty(shape, dtype=dtype)
    memory[-1] = 0
    return memory


def _writes(step: StepBatch, group: int, block_size: int) -> tuple[Tensor, ...]:
    """Return which tokens are written, some of them twice, the blocks and the places in them where they go, and the
    blocks that get their first token."""
    slots = step.groups[group]
    rows_N = np.concatenate([np.arange(len(step.token_ids_T)), step.echo_rows_E])
    blocks_N, offsets_N = np.divmod(np.concatenate([slots.write_slots_T, slots.echo_slots_E]), block_size)
    return tuple(torch.from_numpy(each) for each in (rows_N, blocks_N, offsets_N, blocks_N[offsets_N == 0]))
