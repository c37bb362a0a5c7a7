"""Command R7B and Command A."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "cohere2",
        "sliding_window": metadata.integer("attention.sliding_window"),
        "sliding_window_pattern": metadata.integer("attention.sliding_window_pattern", 4),
        "logit_scale": metadata.number("logit_scale"),
        **read_common(metadata, shapes, layer_norm=True),
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return llama_tensors()
