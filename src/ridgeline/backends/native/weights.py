"""A program's weights as native kernels read them: packed matrices, float32 vectors, plain tables.

Each part is made from the checkpoint's tensors once, or found in a pack that an earlier start left behind.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Protocol

import numpy as np
import torch

from ridgeline import _native
from ridgeline.backends.native.memory import address, allocate
from ridgeline.backends.native.settings import MatrixFormat
from ridgeline.quant import quantize
from ridgeline.weights.gguf.kept import KeptWeights

PANEL = 32
HALF = PANEL // 2
INT8_GROUP = 256  # inputs that share a scale with int8 weights, as native/kernels/types.h says
MIN_PANELS_PER_TASK = 8

Tensors = Mapping[str, torch.Tensor]
Rows = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]


class Store(Protocol):
    """Where finished parts are kept between starts."""

    def find(self, name: str) -> np.ndarray | None:
        """The bytes of part `name`, uint8 and 64-byte aligned, or None."""
        ...

    def keep(self, name: str, data: np.ndarray) -> None:
        """Offers the bytes of a part to the next start."""
        ...


class NoStore:
    """Keeps nothing."""

    def find(self, name: str) -> np.ndarray | None:
        return None

    def keep(self, name: str, data: np.ndarray) -> None: ...


class NativeWeights:
    """Makes parts and holds their memory. `load` reads the checkpoint's tensors; called only if one is missing."""

    def __init__(
        self, load: Callable[[], Tensors], level: str, num_threads: int, store: Store, kept: KeptWeights | None
    ) -> None:
        self._load, self._kept = load, kept
        self._level = level
        self._store = store
        self._threads = ThreadPoolExecutor(num_threads, "pack")
        self._tensors: Tensors | None = None
        self._parts: dict[str, np.ndarray] = {}
        self._matrices: dict[str, _native.Matrix] = {}

    @property
    def num_bytes(self) -> int:
        """Of all parts made so far."""
        return sum(part.nbytes for part in self._parts.values())

    def tensor(self, name: str) -> torch.Tensor:
        """The checkpoint's tensor, for ops that run on the reference backend."""
        if self._tensors is None:
            self._tensors = self._load()
        return self._tensors[name]

    def release(self) -> None:
        """Lets go of the checkpoint's tensors; parts stay."""
        self._tensors = None
        self._threads.shutdown()

    def vector(self, name: str, make: Callable[[], torch.Tensor]) -> int:
        """Address of float32 entries, padded with zeros to whole panels."""

        def padded() -> np.ndarray:
            values = make().detach().float().flatten().numpy()
            out = np.zeros(-(-values.size // PANEL) * PANEL, dtype=np.float32)
            out[: values.size] = values
            return out.view(np.uint8)

        return address(self._part(f"{name}.vector", padded))

    def table(self, name: str) -> tuple[int, str]:
        """Address and kind of a plain table of rows."""

        def rows() -> np.ndarray:
            return _bytes_of(self.tensor(name))

        part = self._part(f"{name}.table", rows)
        kind = self._part(f"{name}.kind", lambda: np.frombuffer(_kind_of(self.tensor(name)).encode(), dtype=np.uint8))
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
        """The rows of `sources` as one packed matrix of `shape` [N, K]; `interleave` puts 16 rows of each of two
        sources side by side in a panel. Of sources [E, rows, K] it is expert 0's, and the others' lie behind it."""
        outputs, inputs = shape
        order = interleaved(outputs // 2) if interleave else np.arange(outputs)

        @cache
        def tensors() -> list[torch.Tensor]:
            return [self.tensor(source) for source in sources]

        def stored(expert: int) -> Rows:
            if form.stored:
                return self._kept_rows(sources, expert)
            return _rounded(_joined([tensor[expert] if tensor.ndim == 3 else tensor for tensor in tensors()]), form)

        return self._packed(name, stored, order, inputs, form, num_experts)

    def rows(
        self, name: str, make: Callable[[int], torch.Tensor], order: np.ndarray, inputs: int, form: MatrixFormat
    ) -> _native.Matrix:
        """Rows `order` of `make(0)`, [., inputs], as one packed matrix; where the order says -1, zeros."""
        return self._packed(name, lambda expert: _rounded(make(expert), form), order, inputs, form, 1)

    def _packed(
        self,
        name: str,
        make: Callable[[int], Rows],
        order: np.ndarray,
        inputs: int,
        form: MatrixFormat,
        num_experts: int,
    ) -> _native.Matrix:
        """Rows `order` of what `make` says of expert 0, packed; the other experts' lie behind it."""
        if name not in self._matrices:
            group = INT8_GROUP if form.kind == "int8" else form.group

            def describe(at: int) -> _native.Matrix:
                return _native.Matrix(form.kind, form.inputs, len(order), inputs, group, form.zero_points, at)

            def packed() -> np.ndarray:
                num_bytes = describe(0).num_bytes
                memory = allocate(num_experts * num_bytes)
                for expert in range(num_experts):
                    self._pack(describe(address(memory) + expert * num_bytes), *make(expert), order)
                return memory

            self._matrices[name] = describe(address(self._part(f"{name}.{form.kind}", packed)))
        return self._matrices[name]

    def _kept_rows(self, sources: Sequence[str], expert: int) -> Rows:
        """The integers of a file, and the scales and minima of an output one behind the other."""
        assert self._kept is not None
        kept = [self._kept.read(source, expert) for source in sources]
        scales = [k.scales if k.minima is None else torch.cat([k.scales, k.minima], dim=1) for k in kept]
        return _joined([k.values for k in kept]).numpy(), _joined(scales).numpy(), None

    def _pack(
        self,
        matrix: _native.Matrix,
        values: np.ndarray,
        scales: np.ndarray | None,
        zero_points: np.ndarray | None,
        order: np.ndarray,
    ) -> None:
        padded = np.full(matrix.num_panels * PANEL, -1, dtype=np.int64)
        padded[: len(order)] = order
        step = max(MIN_PANELS_PER_TASK, matrix.num_panels // 16)

        def pack(begin: int) -> None:
            end = min(begin + step, matrix.num_panels)
            _native.pack(self._level, matrix, values, scales, zero_points, padded, begin, end)

        list(self._threads.map(pack, range(0, matrix.num_panels, step)))

    def _part(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        if name not in self._parts:
            found = self._store.find(name)
            if found is None:
                found = make()
                if address(found) % 64:
                    aligned = allocate(found.nbytes)
                    aligned[:] = found
                    found = aligned
                self._store.keep(name, found)
            self._parts[name] = found
        return self._parts[name]


def interleaved(size: int) -> np.ndarray:
    """Rows i of the first half and i of the second, 16 and 16 to a panel; -1 pads the last panel's halves."""
    first = np.full(-(-size // HALF) * HALF, -1, dtype=np.int64)
    first[:size] = np.arange(size)
    second = np.where(first >= 0, first + size, -1)
    return np.stack([first.reshape(-1, HALF), second.reshape(-1, HALF)], axis=1).flatten()


def _rounded(rows_NK: torch.Tensor, form: MatrixFormat) -> Rows:
    """Values in the format's kind, and of integers scales and maybe zero points."""
    match form.kind:
        case "f32":
            return rows_NK.float().contiguous().numpy(), None, None
        case "bf16":
            return rows_NK.to(torch.bfloat16).contiguous().view(torch.uint16).numpy(), None, None
        case _:
            quantized = quantize(form.kind, rows_NK, form.group, form.zero_points)
            zeros = quantized.zero_points
            return quantized.values.numpy(), quantized.scales.numpy(), None if zeros is None else zeros.numpy()


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1)


def _kind_of(tensor: torch.Tensor) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16"}[tensor.dtype]
