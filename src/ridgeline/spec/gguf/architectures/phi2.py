"""Phi 1, 1.5 and 2."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, fused_qkv, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "phi", **read_common(metadata, shapes, layer_norm=True, free_head_dim=False)}


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return [*llama_tensors(), *fused_qkv()]  # files have one or the other
