"""The tensors of a GGUF model as a checkpoint: dequantized, in the row order and with the offsets of families."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import StoredFormat, StoredMatrix
from ridgeline.spec import gguf
from ridgeline.spec.spec import DecoderSpec, GroupedQueryAttention, Rename
from ridgeline.weights.checkpoint import FLOATS, WHOLE, TensorEntry, take_ranges
from ridgeline.weights.gguf.model import GgufModel
from ridgeline.weights.gguf.reader import GgufTensor

Index = slice | npt.NDArray[np.int64]


class GgufCheckpoint:
    """The tensors of a GGUF model in the row order, with the offsets and in the dtypes of a checkpoint.

    As `weights.checkpoint.Checkpoint`; what is stored in blocks becomes float32. `renames` are those of the
    architecture, `{i}` for every layer. Raises ModelLoadError where two parts of a tensor do not fit each other.
    """

    def __init__(self, model: GgufModel, spec: DecoderSpec) -> None:
        self.path = model.path
        self._tensors = {name: model.tensors[name] for name in model.tensors if name not in gguf.FACTOR_TENSORS}
        stored = gguf.tensors(model.architecture)
        self.renames: Sequence[Rename] = [item.rename for item in stored]
        mixer = spec.layers[0].mixer
        self._head_dim = mixer.head_dim if isinstance(mixer, GroupedQueryAttention) else 0
        layers = [str(layer) for layer in range(len(spec.layers))]
        changed = [item for item in stored if item.offset or item.change]
        self._changed = {item.rename.source.replace("{i}", layer): item for item in changed for layer in layers}
        self._parts: dict[str, tuple[str, str]] = {}
        for first, second, whole in ((*item.split, item.rename.source) for item in stored if item.split):
            for layer in layers:
                names = first.replace("{i}", layer), second.replace("{i}", layer)
                if all(name in self._tensors for name in names):
                    self._parts[whole.replace("{i}", layer)] = names
        parts = {part for names in self._parts.values() for part in names}
        self.entries: Mapping[str, TensorEntry] = {
            name: TensorEntry(tensor.file, self._shape(name), tensor.type.name if tensor.type.name in FLOATS else "F32")
            for name, tensor in self._tensors.items()
            if name not in parts
        } | {whole: self._joined_entry(*names) for whole, names in self._parts.items()}

    def read(self, name: str, dim: int, ranges: Sequence[slice]) -> Array:
        """Return `ranges` of the tensor along `dim`, one after the other; of rows, a stack's too, no others are read.

        Raises ModelLoadError for a damaged tensor.
        """
        if name in self._parts:
            columns_HKA, rows_HBK = (float32(_plain(part, self._tensors[part])) for part in self._parts[name])
            joined = np.concatenate([columns_HKA.swapaxes(1, 2), rows_HBK], axis=1)
            return take_ranges(joined.reshape(-1, joined.shape[-1]), dim, ranges)
        tensor = self._tensors[name]
        if dim == 1 and len(tensor.shape) == 3:
            return np.stack([self._rows(name, tensor.matrix(index), ranges) for index in range(tensor.shape[0])])
        by_rows = dim == 0 and len(tensor.shape) > 1
        declared = self._rows(name, tensor, ranges if by_rows else WHOLE)
        return declared if by_rows else take_ranges(declared, dim, ranges)

    def format_of(self, name: str) -> StoredFormat | None:
        """Return how a matrix, or every matrix of a stack, is stored; None: as plain numbers."""
        tensor = self._tensors.get(name)
        return tensor.type.form if tensor is not None and len(tensor.shape) > 1 else None

    def matrix(self, name: str, index: int | None) -> Callable[[slice], StoredMatrix]:
        """Return what reads rows of a stored matrix, or of matrix `index` of a stack."""
        tensor = self._tensors[name] if index is None else self._tensors[name].matrix(index)

        def rows_of(rows: slice) -> StoredMatrix:
            near, at = self._near(name, tensor, (rows,))
            return near.type.stored_matrix(near.read(), near.shape, at)

        return rows_of

    def _rows(self, name: str, tensor: GgufTensor, ranges: Sequence[slice]) -> Array:
        near, index = self._near(name, tensor, ranges)
        return self._declared(name, _plain(name, near)[index])

    def _near(self, name: str, tensor: GgufTensor, ranges: Sequence[slice]) -> tuple[GgufTensor, Index]:
        """Return the smallest part of a tensor that holds `ranges` of its rows, and where in it they are.

        For paired rows 0, 1, 2, 3 ... of a head in the file, first come 0, 2 ... and then 1, 3 ...
        """
        order = np.arange(tensor.shape[0])
        if name in self._changed and self._changed[name].change == "paired rows":
            order = order.reshape(-1, self._head_dim // 2, 2).swapaxes(1, 2).flatten()
        rows = take_ranges(order, 0, ranges)
        first, end = int(rows.min()), int(rows.max()) + 1
        is_whole = len(rows) == end - first and bool((np.diff(rows) == 1).all())
        return tensor.rows(first, end), slice(None) if is_whole else rows - first

    def _declared(self, name: str, tensor: Array) -> Array:
        """Return rows of the file's tensor as families expect their numbers."""
        if name not in self._changed:
            return tensor
        change = self._changed[name]
        if change.offset:
            tensor = float32(tensor) + np.float32(change.offset)
        if change.change == "log of negative":
            tensor = np.log(-tensor.astype(np.float64)).astype(np.float32)
        return tensor.reshape(1, -1) if change.change == "one row" and tensor.ndim == 1 else tensor

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._tensors[name].shape
        one_row = name in self._changed and self._changed[name].change == "one row"
        return (1, *shape) if one_row and len(shape) == 1 else shape

    def _joined_entry(self, first: str, second: str) -> TensorEntry:
        columns, rows = self._tensors[first], self._tensors[second]
        a, b = columns.shape, rows.shape
        if len(a) != 3 or len(b) != 3 or a[0] != b[0] or a[1] != b[2]:
            raise ModelLoadError(f"{self.path}: tensors {first} {list(a)} and {second} {list(b)} do not fit each other")
        return TensorEntry(columns.file, (a[0] * (a[2] + b[1]), a[1]), "F32")


def _plain(name: str, tensor: GgufTensor) -> Array:
    data = tensor.read()
    if tensor.type.name in FLOATS:
        return data.view(FLOATS[tensor.type.name]).reshape(tensor.shape)
    try:
        return tensor.type.dequantize(data, tensor.shape)
    except ValueError as error:
        raise ModelLoadError(f"{tensor.file}: tensor {name!r}: {error}; the file is damaged") from error
