"""The tensors of a GGUF model as a checkpoint: dequantized, in the row order and with the offsets that families expect.

Called by weights/loader.py and kept.py. What an architecture's tensors mean is in spec/gguf.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from ridgeline.core.errors import ModelLoadError
from ridgeline.spec import gguf
from ridgeline.spec.spec import DecoderSpec, Rename
from ridgeline.weights.checkpoint import DTYPES, TensorEntry
from ridgeline.weights.gguf.model import GgufModel
from ridgeline.weights.gguf.reader import GgufTensor


class GgufCheckpoint:
    """The tensors of a GGUF model in the row order, with the offsets and in the dtypes of a checkpoint.

    As `weights.checkpoint.Checkpoint`; what is stored in blocks becomes float32. `renames` are those of the
    architecture, `{i}` for every layer. Raises ModelLoadError where two parts of a tensor do not fit each other.
    """

    def __init__(self, model: GgufModel, spec: DecoderSpec) -> None:
        self.path = model.path
        self._tensors = {name: model.tensors[name] for name in model.tensors if name not in gguf.FACTOR_TENSORS}
        stored = gguf.architecture(model.architecture).tensors(spec)
        self.renames: Sequence[Rename] = [item.rename for item in stored]
        self._changed = {
            item.rename.source.replace("{i}", str(layer)): item
            for item in stored
            if item.paired_rows or item.offset or item.change
            for layer in range(len(spec.layers))
        }
        self._parts: dict[str, tuple[str, str]] = {}
        for first, second, whole in ((*item.split, item.rename.source) for item in stored if item.split):
            for layer in map(str, range(len(spec.layers))):
                names = first.replace("{i}", layer), second.replace("{i}", layer)
                if all(name in self._tensors for name in names):
                    self._parts[whole.replace("{i}", layer)] = names
        parts = {part for names in self._parts.values() for part in names}
        self.entries: Mapping[str, TensorEntry] = {
            name: TensorEntry(tensor.file, self._shape(name), tensor.type.name if tensor.type.name in DTYPES else "F32")
            for name, tensor in self._tensors.items()
            if name not in parts
        } | {whole: self._joined_entry(*names) for whole, names in self._parts.items()}

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, one in memory at a time. Raises ModelLoadError for a damaged one."""
        for name in names:
            if name in self._parts:
                columns_HKA, rows_HBK = (_plain(part, self._tensors[part]).float() for part in self._parts[name])
                yield name, torch.cat([columns_HKA.transpose(1, 2), rows_HBK], dim=1).flatten(0, 1)
                continue
            tensor = _plain(name, self._tensors[name])
            if name in self._changed:
                tensor = tensor[self.row_order(name, len(tensor))] + self._changed[name].offset
                tensor = tensor.view(self._shape(name))
                if self._changed[name].change == "log of negative":
                    tensor = (-tensor.float()).log()
            yield name, tensor

    def row_order(self, name: str, num_rows: int) -> torch.Tensor:
        """Where each row is in the file. Of paired rows 0, 1, 2, 3 ... of a head first 0, 2 ... and then 1, 3 ..."""
        order = torch.arange(num_rows)
        if name not in self._changed or not self._changed[name].paired_rows:
            return order
        return order.view(-1, self._changed[name].paired_rows // 2, 2).transpose(1, 2).flatten()

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


def _plain(name: str, tensor: GgufTensor) -> torch.Tensor:
    data = tensor.read()
    if tensor.type.name in DTYPES:
        return torch.from_numpy(data).view(DTYPES[tensor.type.name]).view(tensor.shape)
    try:
        return torch.from_numpy(tensor.type.dequantize(data, tensor.shape))
    except ValueError as error:
        raise ModelLoadError(f"{tensor.file}: tensor {name!r}: {error}; the file is damaged") from error
