"""EXAONE 4."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common, read_window
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "exaone4", "sliding_window": read_window(metadata), **read_common(metadata, shapes)}


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return llama_tensors()
