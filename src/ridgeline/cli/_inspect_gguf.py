"""Define what becomes of a GGUF file's tensors on load, as rows of an Inspection."""

import math

from ridgeline.cli._inspection import Inspection, StoredTensors
from ridgeline.quant import prequantized_matrices
from ridgeline.weights.checkpoint import FLOATS
from ridgeline.weights.gguf.model import GgufModel
from ridgeline.weights.gguf.tensors import GgufCheckpoint
from ridgeline.weights.renames import expand, followed
from ridgeline.weights.stored import PrequantizedWeights


def stored_tensors(model: GgufModel, inspection: Inspection) -> list[StoredTensors]:
    """Return one row per type and outcome, the most bytes first; without quantization, on the native backend."""
    stored = _stored(model, inspection)
    rows: dict[tuple[str, str], StoredTensors] = {}
    for name, tensor in model.tensors.items():
        kind, elements = tensor.type.name, math.prod(tensor.shape)
        loaded_bytes = elements * inspection.element
        if name in stored:
            becomes = f"as stored: {tensor.type.integers}"
            loaded_bytes = tensor.num_bytes
        elif kind in FLOATS:
            same = str(FLOATS[kind]) == inspection.dtype
            becomes = "as it is" if same else f"converted to {inspection.dtype}"
        else:
            becomes = f"dequantized to {inspection.dtype}"
        old = rows.get((kind, becomes), StoredTensors(kind, becomes, 0, 0, 0))
        rows[kind, becomes] = StoredTensors(
            kind, becomes, old.num_tensors + 1, old.num_bytes + tensor.num_bytes, old.loaded_bytes + loaded_bytes
        )
    return sorted(rows.values(), key=lambda row: row.num_bytes, reverse=True)


def _stored(model: GgufModel, inspection: Inspection) -> set[str]:
    """Return the names in the file of the tensors that stay as they are stored."""
    checkpoint, program = GgufCheckpoint(model, inspection.spec), inspection.program
    sources = followed(checkpoint.entries.keys(), expand(checkpoint.renames, inspection.spec), program)
    stored = PrequantizedWeights(checkpoint, sources, program)
    return {tensor for name in prequantized_matrices(stored.formats, program) for tensor in stored.tensors(name)}
