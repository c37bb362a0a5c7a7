"""GLM 4 of April 2025."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "glm4",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        **read_common(metadata, shapes),
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    prefix = "layers.{i}.ffn"
    return llama_tensors(Stored(Rename("blk.{i}.ffn_up.weight", (f"{prefix}.gate.weight", f"{prefix}.up.weight"))))
