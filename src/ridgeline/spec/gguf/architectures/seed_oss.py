"""Seed-OSS, whose files call the norm before the feed-forward one after attention."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, one, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "seed_oss",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "attention_out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        **read_common(metadata, shapes),
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return llama_tensors(one("blk.{i}.post_attention_norm", "layers.{i}.ffn_norm"))
