"""ERNIE 4.5 (dense)."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "ernie4_5",
        "use_bias": "blk.0.attn_q.bias" in shapes,
        **read_common(metadata, shapes),
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return llama_tensors()
