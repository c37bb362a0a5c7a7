"""Phi 1, 1.5 and 2."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "phi", **read_common(metadata, shapes, layer_norm=True, free_head_dim=False)}


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    fused = (
        Stored(Rename(f"blk.{{i}}.attn_qkv.{part}", tuple(f"layers.{{i}}.attn.{letter}.{part}" for letter in "qkv")))
        for part in ("weight", "bias")
    )
    return [*llama_tensors(), *fused]  # older files have one or the other
