"""What becomes of a GGUF file's tensors on load, as rows of an Inspection."""

import math

from ridgeline.cli._inspection import Inspection, StoredTensors
from ridgeline.weights.checkpoint import DTYPES
from ridgeline.weights.gguf.kept import BITS, GROUP, KeptWeights
from ridgeline.weights.gguf.model import GgufModel


def stored_tensors(model: GgufModel, inspection: Inspection) -> list[StoredTensors]:
    """One row per type and outcome, the most bytes first; without quantization, on the native backend."""
    kept = KeptWeights(model, inspection.spec, inspection.program).tensors
    rows: dict[tuple[str, str], StoredTensors] = {}
    for name, tensor in model.tensors.items():
        kind, elements = tensor.type.name, math.prod(tensor.shape)
        loaded_bytes = elements * inspection.element
        if name in kept:
            becomes = f"kept: int{BITS[kind]} in groups of {GROUP}{' with minima' if kind == 'Q4_1' else ''}"
            loaded_bytes = tensor.num_bytes
        elif kind in DTYPES:
            same = str(DTYPES[kind]) == f"torch.{inspection.dtype}"
            becomes = "as it is" if same else f"converted to {inspection.dtype}"
        else:
            becomes = f"dequantized to {inspection.dtype}"
        old = rows.get((kind, becomes), StoredTensors(kind, becomes, 0, 0, 0))
        rows[kind, becomes] = StoredTensors(
            kind, becomes, old.num_tensors + 1, old.num_bytes + tensor.num_bytes, old.loaded_bytes + loaded_bytes
        )
    return sorted(rows.values(), key=lambda row: row.num_bytes, reverse=True)
