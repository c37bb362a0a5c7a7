"""Gemma. Its norms are stored with the 1 that the family adds."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "gemma", **read_common(metadata, shapes)}


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return llama_tensors(norm_offset=-1.0)
