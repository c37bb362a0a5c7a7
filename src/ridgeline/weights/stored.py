"""The program's matrices that a checkpoint, whatever its format, stores as small numbers: read without decoding them.

Called by backends whose kernels compute with what is stored, where nobody asked for another quantization.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ModelLoadError
from ridgeline.program.op import Program
from ridgeline.quant.stored import StoredFormat, StoredMatrix, joined
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.folder import QUANTIZATION, ModelFolder
from ridgeline.weights.load import StoredTensors, open_checkpoint
from ridgeline.weights.renames import Source


class PrequantizedWeights:
    """Holds quantized matrices taken from a checkpoint without dequantizing. `formats` has those of the program's
    weights.

    A weight of experts [E, N, K] is E matrices of one format. A weight that the checkpoint stores turned around, with
    inputs as rows, is not among them.
    """

    def __init__(
        self, checkpoint: StoredTensors, sources: Mapping[str, Sequence[tuple[str, Source]]], program: Program
    ) -> None:
        self._checkpoint, self._sources, self._program = checkpoint, sources, program
        self.formats: Mapping[str, StoredFormat] = {
            target: form for target, found in sources.items() if (form := self._format_of(found)) is not None
        }

    def tensors(self, name: str) -> Sequence[str]:
        """Return the names in the checkpoint of the tensors that hold a weight."""
        return [stored for stored, _ in self._sources[name]]

    def read(self, name: str, expert: int = 0, part: slice = slice(None)) -> StoredMatrix:
        """Return rows of one of `formats`, or of one expert of it. Raises ModelLoadError for a damaged tensor."""
        found = self._sources[name]
        stored, source = found[0] if len(found) == 1 else found[expert]
        is_stack = source.rename.experts and source.expert is None
        rows = source.rows(self._program, name, part)
        matrix = joined([self._checkpoint.matrix(stored, expert if is_stack else None, some) for some in rows])
        for numbers in (matrix.scales, matrix.minima):
            if numbers is not None and not np.isfinite(numbers).all():
                file = self._checkpoint.entries[stored].file
                raise ModelLoadError(f"{file}: tensor {stored!r}: a scale is NaN or infinite; the file is damaged")
        return matrix

    def _format_of(self, found: Sequence[tuple[str, Source]]) -> StoredFormat | None:
        forms = {
            None if source.rename.transpose or source.rename.depthwise else self._checkpoint.format_of(name)
            for name, source in found
        }
        return forms.pop() if len(forms) == 1 else None


def prequantized(folder: ModelFolder, spec: DecoderSpec, program: Program) -> PrequantizedWeights | None:
    """Return the matrices that a model folder stores as small numbers; None where it has none.

    Raises what `load_weights` raises for a checkpoint that does not fit the program.
    """
    if folder.gguf is None and folder.config.get(QUANTIZATION) is None:
        return None
    checkpoint, sources = open_checkpoint(folder, spec, program, FLOAT32)
    if isinstance(checkpoint, Checkpoint):
        return None
    weights = PrequantizedWeights(checkpoint, sources, program)
    return weights if weights.formats else None
