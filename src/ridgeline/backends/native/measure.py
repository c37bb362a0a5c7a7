"""Define what a tape will take by asking it: compiled without weights and cache, it can be measured and not run.

Called by `backend.py` before anything is loaded. The sizes are those of the C++ that allocates; none is said here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ridgeline import _native
from ridgeline.backends.base import StepLimits
from ridgeline.backends.native.compile import Compiler
from ridgeline.backends.native.emit import EMITTERS
from ridgeline.backends.native.memory import allocate, allocate_cache, logits_width
from ridgeline.backends.native.settings import NativeSettings
from ridgeline.backends.native.timings import TapeTimings
from ridgeline.backends.native.weights import NativeWeights
from ridgeline.cache.layout import CacheLayout, StateSize, plan_layout
from ridgeline.core.dtypes import Array
from ridgeline.program.op import Program

if TYPE_CHECKING:
    from ridgeline.cost.efficiency import OpTiming

FLOAT32_BYTES = 4
UNLIMITED_BYTES = 1 << 60


class MeasuredTape:
    """Builds the tape of a program, for its sizes. `sizes` are those of the program's states.

    `pieces` are what it computes one after the other, in no time.
    """

    def __init__(self, program: Program, settings: NativeSettings, sizes: Sequence[StateSize], block_size: int) -> None:
        self._num_threads = settings.num_threads
        self._logits_width = logits_width(program)
        self._tape = _native.Tape(settings.level, None, settings.deterministic)
        nothing = CacheLayout(block_size, (), 1)
        layout = plan_layout(sizes, block_size, UNLIMITED_BYTES, 1, 1) if sizes else nothing
        groups = tuple(replace(group, num_blocks=1) for group in layout.groups)
        cache = allocate_cache(program, replace(layout, groups=groups), settings.kv)
        weights = NativeWeights(
            dict[str, Array], settings.level, 1, _Nothing(settings.plain.kind), None, settings.variants
        )
        parts = Compiler(program, weights, settings, self._tape, cache).compile(EMITTERS)
        self.pieces: Sequence[OpTiming] = tuple(TapeTimings(program, settings, parts).of([]))
        self._tape.sample(program.vocab_size)

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Return the most that a step within `limits` allocates beside weights and cache, its logits included."""
        followed = limits.num_seqs if self._num_threads > 1 else 0  # rows of the step that another follows
        logits_bytes = (limits.num_rows + followed) * self._logits_width * FLOAT32_BYTES
        most = (limits.num_tokens, limits.num_seqs, limits.num_rows, limits.context)
        return logits_bytes + self._tape.workspace_bytes(*most, self._num_threads)


class _Nothing:
    """A store that has every part of the weights, with nothing in it."""

    is_cut = False

    def __init__(self, table_kind: str) -> None:
        self._kind = np.frombuffer(table_kind.encode(), dtype=np.uint8)
        self._bytes = allocate(64)

    def find(self, name: str) -> np.ndarray:
        return self._kind if name.endswith(".kind") else self._bytes

    def add(self, name: str, data: np.ndarray) -> None: ...
