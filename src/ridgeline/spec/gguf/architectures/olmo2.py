"""OLMo 2, and OLMo 3, which has a window."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    common = read_common(metadata, shapes)
    window = metadata.optional_integer("attention.sliding_window")
    layers = common["num_hidden_layers"]
    assert isinstance(layers, int)
    metadata.expect("attention.sliding_window_pattern", [(index + 1) % 4 != 0 for index in range(layers)])
    if window is None:
        return {"model_type": "olmo2", **common}
    return {"model_type": "olmo3", "sliding_window": window, **common}


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return llama_tensors()
