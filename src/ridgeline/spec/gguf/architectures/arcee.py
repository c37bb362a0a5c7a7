"""Arcee's AFM."""

from ridgeline.spec.gguf.common import Shapes, paired_tensors, read_common
from ridgeline.spec.reader import ConfigReader

tensors = paired_tensors


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "arcee",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        **read_common(metadata, shapes, paired=True),
    }
