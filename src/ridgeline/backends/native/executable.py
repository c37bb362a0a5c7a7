"""The program over the paged cache in native code: a step is one call, or one per part where an op falls back."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler, Emitter, Part, Place, ReferencePart
from ridgeline.backends.native.emit import DTYPES, EMITTERS
from ridgeline.backends.native.fallback import NativeMemory
from ridgeline.backends.native.memory import address, allocate
from ridgeline.backends.native.settings import NativeSettings
from ridgeline.backends.native.timings import TapeTimings
from ridgeline.backends.native.weights import NativeWeights, NoStore, Store
from ridgeline.backends.reference.ops import MEANINGS
from ridgeline.backends.step import StepBatch, StepOutput
from ridgeline.cache.layout import CacheLayout
from ridgeline.cost.roofline import OpTiming
from ridgeline.program.op import (
    ADAPTERS,
    LOGIT_ROWS,
    LOGITS,
    POSITIONS,
    TOKEN_IDS,
    KvState,
    LatentState,
    Program,
    RecurrentState,
)
from ridgeline.program.opset import OPSET
from ridgeline.weights.gguf.kept import KeptWeights

PANEL = 32


class NativeExecutable:
    """A program bound to packed weights and to cache memory.

    `load` gives the weights as the program names them; it is called only where `store` has not all parts. `native`
    names the kinds of groups that run natively: the others fall back to the reference backend, op by op. `kept` reads
    the weights that `settings.kept` names.
    """

    def __init__(
        self,
        program: Program,
        load: Callable[[], Mapping[str, torch.Tensor]],
        layout: CacheLayout,
        settings: NativeSettings,
        store: Store | None = None,
        native: Mapping[str, Emitter] = EMITTERS,
        kept: KeptWeights | None = None,
    ) -> None:
        self._program, self._layout, self._settings = program, layout, settings
        self._pool = _native.Pool(settings.num_threads)
        self._tape = _native.Tape(settings.level, self._pool, settings.deterministic)
        self._memory: list[np.ndarray] = []
        self._recurrent: dict[int, tuple[Sequence[np.ndarray], int]] = {}  # parts of a state, and its cache group
        self._memories = self._allocate_cache()
        self._weights = NativeWeights(load, settings.level, settings.num_threads, store or NoStore(), kept)
        compiler = Compiler(program, self._weights, settings, self._tape, self._memories, self._recurrent)
        self._parts = compiler.compile(native)
        self._result = compiler.places.get(program.result)  # None: logits, which are no buffer of the tape
        falls_back = {op.op.weights for op in self._parts if isinstance(op, ReferencePart)}
        self._fallback_weights = {name: self._weights.tensor(name) for names in falls_back for name in names}
        self._weights.release()
        self._logits_width = -(-program.vocab_size // PANEL) * PANEL if self._result is None else PANEL
        self._timings = TapeTimings(program, settings, self._parts)
        self._draw_at = len(self._tape)
        self._logits: tuple[np.ndarray, torch.Tensor] | None = None  # of the last step, and as they are shown
        self._tape.draw(program.vocab_size)

    @property
    def parts(self) -> Sequence[Part]:
        """What runs where, in order."""
        return self._parts

    @property
    def weight_bytes(self) -> int:
        """Of the packed weights."""
        return self._weights.num_bytes

    @property
    def workspace_bytes(self) -> int:
        """What the steps so far have allocated beside weights and cache."""
        return self._tape.workspace_bytes

    def run(self, step: StepBatch) -> StepOutput:
        """Computes the step, updates the cache, and draws the tokens of `step.draws`."""
        return self._run(step, None, None)

    def timed(self, step: StepBatch) -> tuple[StepOutput, list[OpTiming]]:
        """`run`, and how long each group of ops took, from barrier to barrier. The last timing is that of the draw."""
        seconds = np.zeros(len(self._tape), dtype=np.float64)
        fallback_s: dict[str, float] = {}
        output = self._run(step, seconds, fallback_s)
        return output, self._timings.of(seconds.tolist(), fallback_s)

    def _run(self, step: StepBatch, seconds: np.ndarray | None, fallback_s: dict[str, float] | None) -> StepOutput:
        for copy in step.copies:
            for state in self._layout.groups[copy.group].states:
                if state in self._memories:
                    self._memories[state][0].copy_block(copy.source, copy.target)
                else:
                    for part in self._recurrent[state][0]:
                        part[copy.target] = part[copy.source]
        logits, shown_RV = self._room(len(step.logit_rows_R))
        drawn = np.empty(len(step.draws.logit_row), dtype=np.int64)
        last = self._parts[-1]
        if isinstance(self._parts[0], ReferencePart):
            self._tape.run(step, logits, 0, 0, drawn)  # sizes the buffers, and what the draw needs
        for part in self._parts:
            if isinstance(part, ReferencePart):
                started = time.perf_counter()
                self._fall_back(part, step, logits)
                if fallback_s is not None:
                    fallback_s[part.op.label] = time.perf_counter() - started
            elif part is last:  # the tokens are drawn by the same call
                self._tape.run(step, logits, part.begin, self._draw_at + 1, drawn, seconds)
            else:
                self._tape.run(step, logits, part.begin, part.end, drawn, seconds)
        if isinstance(last, ReferencePart):
            self._tape.run(step, logits, self._draw_at, self._draw_at + 1, drawn, seconds)
        if self._result is not None:
            return StepOutput(torch.from_numpy(self._rows(self._result, step).copy()))
        return StepOutput(shown_RV, drawn)

    def _room(self, num_rows: int) -> tuple[np.ndarray, torch.Tensor]:
        """Memory for the step's logits, that of the last step where it has as many rows."""
        if self._logits is None or len(self._logits[0]) != num_rows:
            self._logits = None  # freed before more is taken
            logits = np.empty((num_rows, self._logits_width), dtype=np.float32)
            self._logits = logits, torch.from_numpy(logits)[:, : self._program.vocab_size]
        return self._logits

    def _fall_back(self, part: ReferencePart, step: StepBatch, logits: np.ndarray) -> None:
        op, dtype = part.op, DTYPES[self._settings.dtype]
        inputs = [
            self._value(name, place, step) if place is not None else self._step_input(name, step)
            for name, place in zip(op.inputs, part.inputs)
        ]
        wide = OPSET[op.kind].float32_weights
        weights = [self._fallback_weights[name].to(torch.float32 if wide else dtype) for name in op.weights]
        memory = NativeMemory(self._memories, self._recurrent, self._layout, self._settings.level, step)
        with torch.inference_mode():
            outputs = MEANINGS[op.kind](op.attrs, inputs, weights, memory)
        if op.outputs == (LOGITS,):
            logits[:, : self._program.vocab_size] = outputs[0].numpy()
            return
        for place, output in zip(part.outputs, outputs):
            self._rows(place, step)[:] = output.float().flatten(1).numpy()

    def _step_input(self, name: str, step: StepBatch) -> torch.Tensor:
        arrays = {TOKEN_IDS: step.token_ids_T, POSITIONS: step.positions_T, LOGIT_ROWS: step.logit_rows_R}
        if name == ADAPTERS:
            return torch.from_numpy(step.adapters_or_none_T)
        if name in arrays:
            return torch.from_numpy(arrays[name])
        # Keys and values that went to the cache natively: attention reads them there, and here only their shape.
        return torch.empty([0, *self._dims(name)], dtype=DTYPES[self._settings.dtype])

    def _dims(self, name: str) -> list[int]:
        return [dim for dim in self._program.shapes[name][1:] if isinstance(dim, int)]

    def _value(self, name: str, place: Place, step: StepBatch) -> torch.Tensor:
        """A copy of the value in the dtype and the shape that the reference op expects."""
        rows = torch.from_numpy(self._rows(place, step).copy())
        is_float32 = any(OPSET[op.kind].float32_outputs and name in op.outputs for op in self._program.ops)
        return rows.unflatten(1, self._dims(name)).to(torch.float32 if is_float32 else DTYPES[self._settings.dtype])

    def _rows(self, place: Place, step: StepBatch) -> np.ndarray:
        count = len(step.token_ids_T if place.rows == "tokens" else step.logit_rows_R)
        return self._tape.view(place.buffer, count)

    def _allocate_cache(self) -> dict[int, tuple[_native.KvMemory, int]]:
        """The blocks of every KV state, and the cache group that each state belongs to."""
        memories: dict[int, tuple[_native.KvMemory, int]] = {}
        for index, group in enumerate(self._layout.groups):
            for state in group.states:
                kv = self._program.states[state]
                if isinstance(kv, RecurrentState):
                    parts = [self._allocate_part(group.num_blocks, shape) for shape in kv.parts]
                    self._recurrent[state] = (parts, index)
                    continue
                blocks = allocate(self._memory_at(kv, 0).block_bytes * group.num_blocks)
                self._memory.append(blocks)
                memories[state] = (self._memory_at(kv, address(blocks)), index)
        return memories

    def _memory_at(self, state: KvState | LatentState, at: int) -> _native.KvMemory:
        """Blocks of a state at an address."""
        kind, block_size = self._settings.kv, self._layout.block_size
        if isinstance(state, LatentState):
            entries = state.latent_dim + state.rope_dim
            return _native.KvMemory(kind, 1, entries, block_size, at, latent_dim=state.latent_dim)
        return _native.KvMemory(kind, state.num_heads, state.head_dim, block_size, at)

    def _allocate_part(self, num_blocks: int, shape: tuple[int, ...]) -> np.ndarray:
        """One part of a recurrent state for every block, float32."""
        return allocate(4 * num_blocks * math.prod(shape)).view(np.float32).reshape(num_blocks, *shape)
