"""A program's weights as native kernels read them: packed matrices, float32 vectors, plain tables.

Each part is made from the checkpoint's tensors once, or found in a pack that an earlier start left behind.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.memory import Arena, address
from ridgeline.backends.native.settings import MatrixFormat, Variants, kind_name
from ridgeline.core.dtypes import BFLOAT16, FLOAT32, Array, contiguous, float32, to_dtype
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant import StoredMatrix, quantize
from ridgeline.quant.stored import has_words, joined
from ridgeline.weights.load import StreamedWeights

PANEL = 32
HALF = PANEL // 2
PANELS_PER_TASK = 8
ALL = slice(None)
KINDS: Mapping[np.dtype[Any], str] = {FLOAT32: "f32", BFLOAT16: "bf16"}

Tensors = Mapping[str, Array]
Rows = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]  # values, scales, zero points
ReadRows = Callable[[np.ndarray], tuple[Rows, np.ndarray]]
"""Returns rows of a matrix, those asked for among them, and their numbers; both are rising."""


class Store(Protocol):
    """Stores finished parts from one start to the next."""

    def find(self, name: str) -> np.ndarray | None:
        """Return the bytes of part `name`, uint8 and 64-byte aligned, or None."""
        ...

    @property
    def is_cut(self) -> bool:
        """Whether parts that were found are zeros now."""
        ...

    def add(self, name: str, data: np.ndarray) -> None:
        """Offer the bytes of a part to the next start."""
        ...


class NativeWeights:
    """Makes parts and holds their memory. `load` reads the checkpoint's tensors; called only if one is missing.

    `variants` compute the matrices; of a kind that is not there, and without them, those that the level is made for.
    """

    def __init__(
        self,
        load: Callable[[], Tensors],
        level: str,
        num_threads: int,
        store: Store | None,
        prequantized: StreamedWeights | None,
        variants: Variants | None = None,
    ) -> None:
        self._load, self._prequantized = load, prequantized
        self._level, self._variants = level, variants or {}
        self._store = store
        self._threads = ThreadPoolExecutor(num_threads, "pack")
        self._tensors: Tensors | None = None
        self._parts: dict[str, np.ndarray] = {}
        self._memory = Arena()
        self._matrices: dict[str, _native.Matrix] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts made so far."""
        return sum(part.nbytes for part in self._parts.values())

    def largest_parts(self, num_bytes: int) -> Iterator[np.ndarray]:
        """Yield parts, the largest first, until they are `num_bytes` together."""
        for part in sorted(self._parts.values(), key=lambda part: part.nbytes, reverse=True):
            if num_bytes <= 0:
                return
            yield part
            num_bytes -= part.nbytes

    def tensor(self, name: str) -> Array:
        """Return the checkpoint's tensor, for ops that run on the reference backend."""
        if self._tensors is None:
            self._tensors = self._load()
        return self._tensors[name]

    def release(self) -> None:
        """Release the checkpoint's tensors; parts stay."""
        self._tensors = None
        self._threads.shutdown()

    def drop(self) -> None:
        """Free all parts now: none is read any more."""
        self._store, self._memory = None, Arena()
        self._parts.clear()

    def vector(self, name: str, make: Callable[[], Array]) -> int:
        """Return the address of float32 entries, padded with zeros to whole panels."""

        def padded() -> np.ndarray:
            values = float32(make()).reshape(-1)
            return np.pad(values, (0, -values.size % PANEL)).view(np.uint8)

        return address(self._part(f"{name}.vector", padded))

    def entries(self, name: str) -> np.ndarray:
        """Return the memory of `vector`."""
        return self._parts[f"{name}.vector"].view(np.float32)

    def table(self, name: str) -> tuple[int, str]:
        """Return address and kind of a plain table of rows."""

        def rows() -> np.ndarray:
            return contiguous(self.tensor(name)).view(np.uint8).reshape(-1)

        def kind_of() -> np.ndarray:
            return np.frombuffer(KINDS[self.tensor(name).dtype].encode(), dtype=np.uint8)

        part, kind = self._part(f"{name}.table", rows), self._part(f"{name}.kind", kind_of)
        return address(part), bytes(kind).decode()

    def matrix(
        self,
        name: str,
        sources: Sequence[str],
        shape: tuple[int, int],
        form: MatrixFormat,
        *,
        interleave: bool = False,
        num_experts: int = 1,
    ) -> _native.Matrix:
        """Pack the rows of `sources` as one matrix of `shape` [N, K]; `interleave` puts 16 rows of each of two
        sources side by side in a panel. For sources [E, rows, K] it is expert 0's, and the others' lie behind it.

        Inputs that are outliers are left out, see `outliers`."""
        outputs, inputs = shape[0], shape[1] - form.outliers
        order = interleaved(outputs // 2) if interleave else np.arange(outputs)

        @cache
        def tensors() -> list[Array]:
            return [self.tensor(source) for source in sources]

        def read(expert: int) -> ReadRows:
            if form.stored:
                return self._stored(sources, expert, slice(inputs) if form.outliers else ALL)
            rows = [tensor[expert] if tensor.ndim == 3 else tensor for tensor in tensors()]
            return self._quantize(rows[0] if len(rows) == 1 else np.concatenate(rows), form)

        return self._packed(name, read, order, inputs, form, num_experts, self._order(name, sources[0], form))

    def outliers(self, name: str, sources: Sequence[str], shape: tuple[int, int], form: MatrixFormat) -> _native.Matrix:
        """Pack the columns of the inputs that keep 16 bits, which `matrix` leaves out."""
        first, wide = shape[1] - form.outliers, replace(form, inputs="int16", outliers=0)

        read = partial(self._stored, sources, inputs=slice(first, None))
        at = self._order(name, sources[0], form) + first * np.dtype(np.int32).itemsize
        return self._packed(f"{name}.outliers", read, np.arange(shape[0]), form.outliers, wide, 1, at)

    def rows(
        self, name: str, make: Callable[[int], Array], order: np.ndarray, inputs: int, form: MatrixFormat
    ) -> _native.Matrix:
        """Pack rows `order` of `make(0)`, [., inputs], as one matrix; where the order says -1, zeros."""
        return self._packed(name, lambda expert: self._quantize(make(expert), form), order, inputs, form, 1)

    def _packed(
        self,
        name: str,
        read: Callable[[int], ReadRows],
        order: np.ndarray,
        inputs: int,
        form: MatrixFormat,
        num_experts: int,
        inputs_from: int = 0,
    ) -> _native.Matrix:
        """Pack rows `order` of what `read` says for expert 0; the other experts' lie behind it.

        `inputs_from`: the address of the order of the inputs, 0 where there is none.
        """
        if name not in self._matrices:

            def describe(location: int) -> _native.Matrix:
                kind = (form.kind, form.inputs, len(order), inputs, form.input_group, form.zero_points)
                matrix = _native.Matrix(*kind, location, inputs_from)
                return _native.tuned(self._level, matrix, self._variants.get(kind_name(form), {}))

            def packed() -> np.ndarray:
                num_bytes = describe(0).num_bytes
                memory = self._memory.take(num_experts * num_bytes)
                for expert in range(num_experts):
                    self._pack(describe(address(memory) + expert * num_bytes), read(expert), order)
                return memory

            self._matrices[name] = describe(address(self._part(f"{name}.{form.kind}", packed)))
        return self._matrices[name]

    def _order(self, name: str, source: str, form: MatrixFormat) -> int:
        """Return the address of the order in which a checkpoint stores the inputs; 0: as they are computed."""
        if not form.order:
            return 0

        def order() -> np.ndarray:
            assert self._prequantized is not None
            found = self._prequantized.matrix(source, 0, slice(1)).order
            assert found is not None
            return found.view(np.uint8)

        return address(self._part(f"{name}.order", order))

    def _quantize(self, rows_NK: Array, form: MatrixFormat) -> ReadRows:
        """Convert to the format's kind: values, and for integers scales and maybe zero points."""
        match form.kind:
            case "f32":
                rows: Rows = contiguous(float32(rows_NK)), None, None
            case "bf16":
                rows = contiguous(to_dtype(rows_NK, BFLOAT16)).view(np.uint16), None, None
            case _:
                rows = _rows(quantize(form.scheme_name, rows_NK, form.stored_format, self._threads.map))
        return lambda wanted: (rows, np.arange(len(rows_NK)))

    def _stored(self, sources: Sequence[str], expert: int, inputs: slice) -> ReadRows:
        """Read some `inputs` of matrices one below the other as a checkpoint stores them, few rows at a time.

        What is not packed yet stays small, in a core's cache and in memory that is used again.
        """
        weights = self._prequantized
        assert weights is not None
        ends = np.cumsum([weights.program.weights[source][-2] for source in sources])
        readers = [weights.matrix_rows(source, expert) for source in sources]

        def read(wanted: np.ndarray) -> tuple[Rows, np.ndarray]:
            own = zip(readers, [0, *ends], np.split(wanted, np.searchsorted(wanted, ends[:-1])))
            found = joined([rows_of(slice(rows[0] - at, rows[-1] + 1 - at)) for rows_of, at, rows in own if len(rows)])
            assert len(found.scales) == len(wanted), "those of a source follow one another"
            if found.format.code == "e4m3" and ((found.codes & 127) == 127).any():
                raise ModelLoadError(f"{' or '.join(sources)} has a NaN, which no kernel holds; download it again")
            return _rows(found, inputs), wanted

        return read

    def _pack(self, matrix: _native.Matrix, read: ReadRows, order: np.ndarray) -> None:
        padded = np.full(matrix.num_panels * PANEL, -1, dtype=np.int64)
        padded[: len(order)] = order

        def pack(begin: int) -> None:
            end, own = min(begin + PANELS_PER_TASK, matrix.num_panels), np.full_like(padded, -1)
            wanted = padded[begin * PANEL : end * PANEL]
            rows, numbers = read(np.sort(wanted[wanted >= 0]))
            own[begin * PANEL : end * PANEL] = np.where(wanted < 0, -1, np.searchsorted(numbers, wanted))
            pack_rows = _native.pack_words if has_words(rows[0]) else _native.pack
            pack_rows(self._level, matrix, *rows, own, begin, end)

        list(self._threads.map(pack, range(0, matrix.num_panels, PANELS_PER_TASK)))

    def _part(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        if name not in self._parts:
            found = self._store.find(name) if self._store else None
            if found is None:
                found = make()
                if address(found) % 64:
                    aligned = self._memory.take(found.nbytes)
                    aligned[:] = found
                    found = aligned
                if self._store:
                    self._store.add(name, found)
            self._parts[name] = found
        return self._parts[name]


def interleaved(size: int) -> np.ndarray:
    """Return rows i of the first half and i of the second, 16 and 16 to a panel; -1 pads the last panel's halves."""
    first = np.full(-(-size // HALF) * HALF, -1, dtype=np.int64)
    first[:size] = np.arange(size)
    second = np.where(first >= 0, first + size, -1)
    return np.stack([first.reshape(-1, HALF), second.reshape(-1, HALF)], axis=1).flatten()


def _rows(matrix: StoredMatrix, inputs: slice = ALL) -> Rows:
    """Return a stored matrix as it is packed: an output's scales, then its minima, then what these are multiples of.

    Some `inputs` of it share the scales of all.
    """
    numbers, points = [matrix.scales, *([] if matrix.minima is None else [matrix.minima])], matrix.points
    if matrix.format.scale == "e4m3" and matrix.outer is not None:
        numbers.append(matrix.outer)
    elif matrix.outer is not None:
        outer = np.moveaxis(matrix.outer, 2, 0)
        spread = [np.repeat(part, numbers[0].shape[1] // part.shape[1], axis=1) for part in outer]
        whole = [np.divide(n, by, out=np.zeros_like(n), where=by != 0) for n, by in zip(numbers, spread, strict=True)]
        numbers = [*whole, *outer]
    scales = numbers[0] if len(numbers) == 1 else np.concatenate(numbers, axis=1)
    packed = matrix.packed if has_words(matrix.packed) and inputs == ALL else contiguous(matrix.codes[:, inputs])
    return packed, contiguous(scales), None if points is None else contiguous(points)


def in_order(values: Array, order: np.ndarray) -> Array:
    """Return entries `order` of the last axis; zeros where the order says -1."""
    return np.where(order >= 0, values[..., np.maximum(order, 0)], 0)
