"""Matrices that native kernels read as they are stored: integers with float16 scales for 32 inputs of an output.

Called by `engine/build.py` for a model in a GGUF file, where nobody asked for another quantization.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ridgeline.core.errors import ModelLoadError
from ridgeline.program.op import TOKEN_IDS, Program
from ridgeline.program.ops.experts import expert_matrices, routers
from ridgeline.program.passes.fuse import MATRIX_OPS, fuse
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.gguf.model import GgufModel
from ridgeline.weights.gguf.reader import Bytes, GgufTensor
from ridgeline.weights.gguf.tensors import GgufCheckpoint
from ridgeline.weights.gguf.types import q4_values
from ridgeline.weights.loader import expand

GROUP = 32  # inputs that share a scale
BITS: Mapping[str, int] = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}  # of the types that are kept


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """A matrix [N, K]: uint8 `values` [N, K], float32 `scales` [N, K / 32] and maybe `minima` like them.

    Without minima the values lie around 128 or 8. Scales and minima are float16 in the file.
    """

    values: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None


class KeptWeights:
    """The program's weights that stay as they are stored; `types` has the GGUF type of each.

    Layers that run as one matrix are kept where all of them have the same type. Experts [E, N, K] are E matrices.
    """

    def __init__(self, model: GgufModel, spec: DecoderSpec, program: Program) -> None:
        self._model, self._checkpoint = model, GgufCheckpoint(model, spec)
        self._sources: dict[str, tuple[str, slice]] = {}
        for rename in expand(self._checkpoint.renames, spec):
            tensor, begin = model.tensors.get(rename.source), 0
            if tensor is None or tensor.type.name not in BITS or len(tensor.shape) < 2 or rename.groups > 1:
                continue
            for target in rename.targets:
                rows = program.weights[target][-2] if target in program.weights else 0
                self._sources[target] = rename.source, slice(begin, begin + rows)
                begin += rows
        stored = {name: model.tensors[source].type.name for name, (source, _) in self._sources.items()}
        self.types: Mapping[str, str] = {
            name: stored[name]
            for names in _matrices(program)
            if names[0] in stored and len({stored.get(name) for name in names}) == 1
            for name in names
        }
        self._shapes = {name: program.weights[name] for name in self.types}

    @property
    def tensors(self) -> frozenset[str]:
        """The names in the file of what is kept."""
        return frozenset(self._sources[name][0] for name in self.types)

    def saved_bytes(self, element_bytes: int) -> int:
        """How many bytes fewer these weights take than with so many for each element."""
        return sum(
            math.prod(shape) * element_bytes - self._model.tensors[self._sources[name][0]].type.num_bytes(shape)
            for name, shape in self._shapes.items()
        )

    def read(self, name: str, expert: int = 0) -> GroupedIntegers:
        """One of `types`, or one expert of it. Raises ModelLoadError for a damaged tensor."""
        source, rows = self._sources[name]
        tensor = self._model.tensors[source]
        if len(tensor.shape) == 3:
            num_bytes = tensor.num_bytes // tensor.shape[0]
            offset = tensor.offset + expert * num_bytes
            tensor = replace(tensor, shape=tensor.shape[1:], offset=offset, num_bytes=num_bytes)
        values, scales = _integers(tensor)
        if not scales.isfinite().all():
            raise ModelLoadError(f"{tensor.file}: tensor {source!r}: a scale is NaN or infinite; the file is damaged")
        order = self._checkpoint.row_order(source, tensor.shape[0])[rows]
        minima = scales[1][order] if len(scales) > 1 else None
        return GroupedIntegers(torch.from_numpy(values)[order], scales[0][order], minima)


def _matrices(program: Program) -> Iterator[Sequence[str]]:
    """The weights that are read as matrices, those of one matrix together; a router's is never rounded or kept."""
    for group in fuse(program):
        names = [op.weights[0] for op in group.ops if op.kind in MATRIX_OPS]
        if names and names[0] not in routers(program):
            yield names
        for op in group.ops:
            if op.kind == "embed" and op.inputs == (TOKEN_IDS,):
                yield op.weights[:1]
            elif op.kind == "experts":
                yield from expert_matrices(op)


def _integers(tensor: GgufTensor) -> tuple[Bytes, torch.Tensor]:
    """Values [N, K], and scales and maybe minima [1 or 2, N, K / 32]."""
    blocks = tensor.read().reshape(-1, tensor.type.block_bytes)
    begin = tensor.type.block_bytes - GROUP * BITS[tensor.type.name] // 8
    floats = torch.from_numpy(blocks[:, :begin].copy()).view(torch.float16).float()
    values = blocks[:, begin:] ^ np.uint8(128) if BITS[tensor.type.name] == 8 else q4_values(blocks, begin)
    return values.reshape(tensor.shape), floats.T.reshape(begin // 2, tensor.shape[0], -1)
