"""Phi 3, 3.5 and 4-mini: fused projections and LongRoPE."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "phi3",
        "sliding_window": metadata.optional_integer("attention.sliding_window", low=0) or None,
        **read_common(metadata, shapes),
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    prefix = "layers.{i}"
    return llama_tensors(
        Stored(Rename("blk.{i}.attn_qkv.weight", tuple(f"{prefix}.attn.{letter}.weight" for letter in "qkv"))),
        Stored(Rename("blk.{i}.ffn_up.weight", (f"{prefix}.ffn.gate.weight", f"{prefix}.ffn.up.weight"))),
    )
