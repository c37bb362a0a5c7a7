"""OLMo 2, and OLMo 3, which has a window."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common, read_window
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    common, window = read_common(metadata, shapes), read_window(metadata)
    if window is None:
        return {"model_type": "olmo2", **common}
    return {"model_type": "olmo3", "sliding_window": window, **common}


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return llama_tensors()
