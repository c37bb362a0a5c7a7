"""Matrices that native kernels read as they are stored: integers with a float16 scale for 32 inputs of an output.

Called by `engine/build.py` for a model in a GGUF file, where nobody asked for another quantization.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.core.errors import ModelLoadError
from ridgeline.program.op import TOKEN_IDS, Program
from ridgeline.program.ops.experts import routers
from ridgeline.program.passes.fuse import MATRIX_OPS, fuse
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.gguf.model import GgufModel
from ridgeline.weights.gguf.reader import Bytes
from ridgeline.weights.gguf.tensors import GgufCheckpoint
from ridgeline.weights.gguf.types import q4_values
from ridgeline.weights.loader import expand

GROUP = 32  # inputs that share a scale
BITS: Mapping[str, int] = {"Q8_0": 8, "Q4_0": 4}


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """A matrix [N, K]: uint8 `values` [N, K] around 128 or 8, and float32 `scales` [N, K / 32], float16 in the file."""

    values: torch.Tensor
    scales: torch.Tensor


class KeptWeights:
    """The program's weights that stay as they are stored; `bits` has those of each, 8 or 4.

    Linear layers that run as one matrix are kept where all of them have the same bits.
    """

    def __init__(self, model: GgufModel, spec: DecoderSpec, program: Program) -> None:
        self._model, self._checkpoint = model, GgufCheckpoint(model, spec)
        self._sources: dict[str, tuple[str, slice]] = {}
        for rename in expand(self._checkpoint.renames, spec):
            tensor, begin = model.tensors.get(rename.source), 0
            if tensor is None or tensor.type.name not in BITS or len(tensor.shape) != 2:
                continue
            for target in rename.targets:
                rows = program.weights[target][0] if target in program.weights else 0
                self._sources[target] = rename.source, slice(begin, begin + rows)
                begin += rows
        stored = {name: BITS[model.tensors[source].type.name] for name, (source, _) in self._sources.items()}
        self.bits: Mapping[str, int] = {
            name: stored[name]
            for names in _matrices(program)
            if names[0] in stored and len({stored.get(name) for name in names}) == 1
            for name in names
        }
        self._elements = {name: math.prod(program.weights[name]) for name in self.bits}

    @property
    def tensors(self) -> frozenset[str]:
        """The names in the file of what is kept."""
        return frozenset(self._sources[name][0] for name in self.bits)

    def saved_bytes(self, element_bytes: int) -> int:
        """How many bytes fewer these weights take than with so many for each element."""
        return sum(
            elements * (8 * element_bytes - self.bits[name]) // 8 - 2 * elements // GROUP
            for name, elements in self._elements.items()
        )

    def read(self, name: str) -> GroupedIntegers:
        """One of `bits`. Raises ModelLoadError for a damaged tensor."""
        source, rows = self._sources[name]
        tensor = self._model.tensors[source]
        values, scales = _integers(tensor.read(), tensor.shape, tensor.type.name)
        if not scales.isfinite().all():
            raise ModelLoadError(f"{tensor.file}: tensor {source!r}: a scale is NaN or infinite; the file is damaged")
        order = self._checkpoint.row_order(source, tensor.shape[0])[rows]
        return GroupedIntegers(torch.from_numpy(values)[order], scales[order])


def _matrices(program: Program) -> Iterator[Sequence[str]]:
    """The weights that are read as matrices, those of one matrix together; a router's is never rounded or kept."""
    for group in fuse(program):
        names = [op.weights[0] for op in group.ops if op.kind in MATRIX_OPS]
        if names and names[0] not in routers(program):
            yield names
        yield from ([op.weights[0]] for op in group.ops if op.kind == "embed" and op.inputs == (TOKEN_IDS,))


def _integers(data: Bytes, shape: tuple[int, ...], kind: str) -> tuple[Bytes, torch.Tensor]:
    blocks = data.reshape(-1, 2 + GROUP * BITS[kind] // 8)
    scales = torch.from_numpy(blocks[:, :2].copy()).view(torch.float16).float().view(shape[0], -1)
    values = blocks[:, 2:] ^ np.uint8(128) if kind == "Q8_0" else q4_values(blocks, 2)
    return values.reshape(shape), scales
