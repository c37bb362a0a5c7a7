"""Tell what becomes of the tensors of a GGUF file or of quantized weights on load, as rows of an Inspection."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ridgeline.cli._inspection import Inspection, TensorsOfType
from ridgeline.core.dtypes import DTYPES
from ridgeline.quant import StoredFormat, decoded_matrices, prequantized_matrices
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.formats import PackedCheckpoint
from ridgeline.weights.gguf.tensors import GgufCheckpoint
from ridgeline.weights.load import StreamedWeights
from ridgeline.weights.quality import read_quality


class _Tensor(NamedTuple):
    """A tensor of the model as the file has it: several parts count as one."""

    name: str
    kind: str
    shape: tuple[int, ...]
    num_bytes: int
    form: StoredFormat | None


def with_stored(inspection: Inspection, model: Path, folder: ModelFolder | None) -> Inspection:
    """Return it with what was measured of a model, and the tensors of its folder, where that is quantized."""
    stored = () if folder is None else stored_tensors(folder, inspection)
    return replace(inspection, stored=stored, quality=read_quality(model).described())


def stored_tensors(folder: ModelFolder, inspection: Inspection) -> list[TensorsOfType]:
    """Return one row per type and outcome, the most bytes first; without quantization, on the native backend."""
    weights = StreamedWeights(folder, inspection.spec, inspection.program, DTYPES[inspection.dtype])
    if isinstance(weights.checkpoint, Checkpoint):
        return []
    prequantized = prequantized_matrices(weights.formats, inspection.program)
    stay = {tensor for name in prequantized for tensor in weights.tensors(name)}
    reasons = decoded_matrices(weights.formats, inspection.program)
    why = {tensor: reason for name, reason in reasons.items() for tensor in weights.tensors(name)}
    rows: dict[tuple[str, str], TensorsOfType] = {}
    for tensor in _tensors(weights.checkpoint, folder):
        becomes = _outcome(tensor, inspection.dtype, stay, why)
        row = rows.setdefault((tensor.kind, becomes), TensorsOfType(tensor.kind, becomes))
        num_weights = math.prod(tensor.shape)
        form = tensor.form if tensor.name in stay else None
        row.num_tensors += 1
        row.num_weights += num_weights
        row.num_bytes += tensor.num_bytes
        row.loaded_bytes += num_weights * inspection.element if form is None else form.num_bytes(tensor.shape)
    return sorted(rows.values(), key=lambda row: row.num_bytes, reverse=True)


def _outcome(tensor: _Tensor, dtype: str, stay: set[str], why: Mapping[str, str]) -> str:
    if tensor.name in stay:
        return f"as stored: {tensor.form}"
    if tensor.kind in FLOATS:
        return "as it is" if str(FLOATS[tensor.kind]) == dtype else f"converted to {dtype}"
    if tensor.form is None:
        return f"dequantized to {dtype}: no kernel multiplies {tensor.kind}"
    return f"dequantized to {dtype}: {why.get(tensor.name, 'it is cut or turned around otherwise than it is stored')}"


def _tensors(checkpoint: PackedCheckpoint | GgufCheckpoint, folder: ModelFolder) -> Iterator[_Tensor]:
    if isinstance(checkpoint, PackedCheckpoint):
        for name, entry in checkpoint.entries.items():
            form = checkpoint.format_of(name)
            kind = entry.dtype if form is None else str(form)
            yield _Tensor(name, kind, entry.shape, checkpoint.stored_bytes(name), form)
    elif folder.gguf is not None:
        for name, tensor in folder.gguf.tensors.items():
            yield _Tensor(name, tensor.type.name, tensor.shape, tensor.num_bytes, tensor.type.form)
