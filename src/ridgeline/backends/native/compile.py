"""Program -> tape: every group of ops becomes native instructions.

Legend: T tokens · R rows that need logits · N query heads · K key/value heads · D head size · V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.memory import CacheMemory, address
from ridgeline.backends.native.settings import MatrixFormats, NativeSettings
from ridgeline.backends.native.weights import NativeWeights, in_order, interleaved
from ridgeline.core.dtypes import Array, float32
from ridgeline.program.op import FEATURES, Op, Program, dims_of
from ridgeline.program.ops.dense import MATRIX_OPS, NormAttrs
from ridgeline.program.ops.recurrent import RecurrentAttrs
from ridgeline.program.passes.fuse import Group, fuse
from ridgeline.program.passes.liveness import Liveness, liveness


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value's rows are: a buffer of the tape with rows for tokens or logits.

    `slice_of`: the buffer's columns are some of that one's. Instructions read a slice like any buffer; a matrix product
    cannot write one.
    """

    buffer: int
    rows: str
    width: int
    slice_of: int | None = None

    @property
    def memory(self) -> int:
        """The buffer that holds the columns."""
        return self.buffer if self.slice_of is None else self.slice_of


class Part(NamedTuple):
    """Holds instructions `begin .. end` of the tape, which compute a group."""

    group: Group
    begin: int
    end: int


class Compiler:
    """Builds a tape. A buffer is used again once the last reader of its value has run."""

    def __init__(
        self, program: Program, weights: NativeWeights, settings: NativeSettings, tape: _native.Tape, cache: CacheMemory
    ) -> None:
        self.program, self.weights, self.settings, self.tape, self.cache = program, weights, settings, tape, cache
        self.formats = MatrixFormats(settings, program)
        self.places: dict[str, Place] = {}
        self._free: dict[tuple[str, int], list[int]] = {}
        self._lives = Liveness((), {})
        self._widths: dict[int, int] = {}
        self._now = 0
        self.features: Place | None = None  # where the step's features go, of a program that reads them

    def compile(self, native: Mapping[str, "Emitter"]) -> list[Part]:
        """Return the parts of the step in order. Groups that `native` lacks run op by op.

        So do groups whose matrices are stored otherwise than one another. What follows products of inputs of two
        widths is apart from them.
        """
        groups = [part for group in fuse(self.program) for part in self._known(group, native)]
        self._lives = liveness([group.ops for group in groups], self.program.result, *self.program.taps)
        if FEATURES in self.program.shapes:
            self.features = self.new(FEATURES)
        parts: list[Part] = []
        for self._now, group in enumerate(groups):
            begin = len(self.tape)
            native[group.kind](self, group)
            if len(self.tape) > begin:  # else the group names memory differently
                parts.append(Part(group, begin, len(self.tape)))
            self._release()
        return parts

    def _known(self, group: Group, native: Mapping[str, "Emitter"]) -> list[Group]:
        matrices = [op.weights[0] for op in group.ops if op.kind in MATRIX_OPS]
        if group.kind in native and self.formats.alike(*matrices):
            if group.kind in ("norm_gated", "norm_activated") and self.formats.of(*matrices).outliers:
                *linears, last = group.ops
                return [Group("norm_linears", group.label, tuple(linears)), Group(last.kind, last.label, (last,))]
            return [group]
        return [Group(op.kind, op.label, (op,)) for op in group.ops]

    def place(self, name: str) -> Place:
        return self.places[name]

    def inputs(self, op: Op) -> list[int]:
        """Return the buffers of the op's inputs."""
        return [self.places[name].buffer for name in op.inputs]

    def output(self, op: Op) -> int:
        """Return a new buffer for the op's first output."""
        return self.new(op.outputs[0]).buffer

    def vector(self, name: str) -> int:
        """Return the address of weight `name` as float32 entries."""
        return self.weights.vector(name, lambda: self.weights.tensor(name))

    def state_part(self, attrs: RecurrentAttrs) -> _native.StatePart:
        """Return where a recurrent op keeps its state of a sequence."""
        parts, group = self.cache.recurrent[attrs.state]
        part, logs = parts[attrs.part], self.cache.logs[attrs.state]
        if not logs:
            return _native.StatePart(address(part), part[0].size, group)
        log = logs[attrs.part]
        return _native.StatePart(address(part), part[0].size, group, address(log), log.shape[2], log.shape[1])

    def new(self, name: str, width: int | None = None) -> Place:
        """Return a place for value `name`, as wide as its row unless `width` says otherwise."""
        shape = self.program.shapes[name]
        kind = "tokens" if shape[0] == "T" else "logits"
        width = width or math.prod(dims_of(shape))
        free = self._free.get((kind, width))
        buffer = free.pop() if free else self.tape.buffer(kind, width)
        self._widths[buffer] = width
        self.places[name] = Place(buffer, kind, width)
        return self.places[name]

    def slice(self, place: Place, offset: int, width: int) -> Place:
        """Return columns `offset .. offset + width` of `place`."""
        return Place(self.tape.slice(place.buffer, offset, width), place.rows, width, place.memory)

    def can_reuse_buffer(self, name: str) -> bool:
        """Tell whether the group being emitted is the last to read value `name` and its buffer."""
        place = self.places[name]
        if place.slice_of is not None:
            return False
        others = [other for other, at in self.places.items() if other != name and at.memory == place.buffer]
        last_reader = self._lives.last_reader
        return last_reader.get(name) == self._now and not any(last_reader.get(o, -1) >= self._now for o in others)

    def norm(self, op: Op | None) -> _native.Norm:
        """Return the norm of `op`; none where there is no op."""
        if op is None:
            return _native.Norm()
        assert isinstance(op.attrs, NormAttrs)
        if not op.weights:
            width = dims_of(self.program.shapes[op.inputs[0]])[-1]
            ones = self.weights.vector(f"ones.{width}", lambda: np.ones(width, np.float32))
            return _native.Norm("rms", op.attrs.eps, ones)
        offset = 1.0 if op.attrs.unit_offset else 0.0
        weights, bias = (op.weights, ()) if op.kind == "rmsnorm" else (op.weights[:1], op.weights[1:])

        def product() -> Array:
            return functools.reduce(np.multiply, (float32(self.weights.tensor(name)) + offset for name in weights))

        scale = self.weights.vector("*".join(weights), product)
        shift = self.vector(bias[0]) if bias else 0
        by_head = any(len(self.program.weights[name]) > 1 for name in weights)
        return _native.Norm("layer" if op.kind == "layernorm" else "rms", op.attrs.eps, scale, shift, by_head)

    def matrix(self, ops: Sequence[Op], *, interleave: bool = False) -> tuple[_native.Matrix, int]:
        """Return the weights of linear ops with one input as one packed matrix, and the address of their bias or 0."""
        names = [op.weights[0] for op in ops]
        form = self.formats.of(*names)
        shape = (sum(self.program.weights[name][0] for name in names), self.program.weights[names[0]][1])
        matrix = self.weights.matrix("+".join(names), names, shape, form, interleave=interleave)
        if all(len(op.weights) == 1 for op in ops):
            return matrix, 0

        def bias() -> Array:
            pieces: list[Array] = []
            for op in ops:
                weight, *has = op.weights
                rows = self.program.weights[weight][0]
                pieces.append(float32(self.weights.tensor(has[0])) if has else np.zeros(rows, np.float32))
            joined = np.concatenate(pieces)
            return in_order(joined, interleaved(shape[0] // 2)) if interleave else joined

        return matrix, self.weights.vector("+".join(names) + ".bias", bias)

    def outliers(self, ops: Sequence[Op]) -> _native.Matrix | None:
        """Return the columns of inputs in 16 bits that `matrix` leaves out; None where there are none."""
        names = [op.weights[0] for op in ops]
        form = self.formats.of(*names)
        shape = (sum(self.program.weights[name][0] for name in names), self.program.weights[names[0]][1])
        return self.weights.outliers("+".join(names), names, shape, form) if form.outliers else None

    def _release(self) -> None:
        """Release the buffers whose values nobody reads any more."""
        for name in self._lives.ends[self._now]:
            place = self.places.pop(name, None)  # none: an input of the step, or a value within the group
            if place is not None and not any(other.memory == place.memory for other in self.places.values()):
                self._free.setdefault((place.rows, self._widths[place.memory]), []).append(place.memory)


Emitter = Callable[[Compiler, Group], None]
