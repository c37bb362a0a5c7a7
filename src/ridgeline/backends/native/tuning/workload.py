"""Runs products to be timed: packed matrices of one kind, multiplied by all threads of a pool, as in a step."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.memory import PANEL, address, allocate
from ridgeline.backends.native.settings import MatrixFormat
from ridgeline.backends.step import StepBatch, StepShape

INPUTS = 2048  # of every matrix; where they end matters little
MATRIX_BYTES = 8 << 20
CACHED_BYTES = 1 << 20
FILLING = 0x3C  # as float16 1.06, as bfloat16 0.011, as float32 0.011: nothing that is slow to compute with

Run = Callable[[], float]
"""Does the work once and returns the seconds that it took."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows times matrices that lie in memory, or times a small one that stays in the cache."""

    num_rows: int
    cached: bool


def empty_matrix(form: MatrixFormat, outputs: int, inputs: int, at: int = 0) -> _native.Matrix:
    """Describe a matrix of a format at an address, nothing packed yet."""
    return _native.Matrix(form.kind, form.inputs, outputs, inputs, form.input_group, form.zero_points, at)


class Bench:
    """The threads, and the memory in which the matrices lie: `buffer_bytes`, of which a run from memory takes half."""

    def __init__(self, level: str, num_threads: int, buffer_bytes: int) -> None:
        self._level, self._pool = level, _native.Pool(num_threads)
        self._memory = allocate(buffer_bytes)
        with ThreadPoolExecutor(num_threads) as threads:  # physical pages, on the nodes of several threads
            list(threads.map(_fill, np.array_split(self._memory, num_threads)))

    def read_run(self, num_bytes: int) -> Run:
        """Return the reading of `num_bytes`, a multiple of 64, by all threads: the next of the buffer each time."""
        places = cycle(range(0, len(self._memory) - num_bytes + 1, num_bytes))

        def run() -> float:
            at = address(self._memory) + next(places)
            started = time.perf_counter()
            _native.read_all(self._level, self._pool, at, num_bytes)
            return time.perf_counter() - started

        return run

    def product_run(self, form: MatrixFormat, variants: Mapping[str, str], workload: Workload, num_bytes: int) -> Run:
        """Return products of about `num_bytes` of weights; those from memory are the next in the buffer each time."""
        size = CACHED_BYTES if workload.cached else MATRIX_BYTES
        panel_bytes = empty_matrix(form, PANEL, INPUTS).panel_bytes
        outputs = max(1, size // panel_bytes) * PANEL
        matrix_bytes = outputs // PANEL * panel_bytes
        step = -(-matrix_bytes // 64) * 64
        count = max(1, num_bytes // matrix_bytes)
        if workload.cached:
            places = [[0] * count]
        else:
            offsets = range(0, len(self._memory) - matrix_bytes + 1, step)
            count = min(count, len(offsets) // 2)
            places = [offsets[at : at + count] for at in range(0, len(offsets) - count + 1, count)]
        tapes = cycle([self._tape(form, variants, outputs, offsets) for offsets in places])
        shape = StepShape(workload.num_rows)  # of a step of tokens that belong to no sequence
        block = StepBatch.lay_out(np.zeros(shape.num_words, dtype=np.int64), shape).block
        logits = np.empty((0, PANEL), dtype=np.float32)

        def run() -> float:
            tape = next(tapes)
            started = time.perf_counter()
            tape.run(block, logits, 0, count)
            return time.perf_counter() - started

        return run

    def _tape(
        self, form: MatrixFormat, variants: Mapping[str, str], outputs: int, offsets: Sequence[int]
    ) -> _native.Tape:
        tape = _native.Tape(self._level, self._pool)
        x, y = tape.buffer("tokens", INPUTS), tape.buffer("tokens", outputs)
        for offset in offsets:
            matrix = empty_matrix(form, outputs, INPUTS, address(self._memory) + offset)
            tape.linear(_native.tuned(self._level, matrix, variants), _native.Norm(), x, y)
        return tape


def _fill(part: np.ndarray) -> None:
    part.fill(FILLING)
