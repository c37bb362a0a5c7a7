"""Granite 3: Llama with four factors."""

from ridgeline.spec.gguf.common import Shapes, paired_tensors, read_common
from ridgeline.spec.reader import ConfigReader

tensors = paired_tensors


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "granite",
        "attention_multiplier": metadata.number("attention.scale"),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        **read_common(metadata, shapes, paired=True),
    }
