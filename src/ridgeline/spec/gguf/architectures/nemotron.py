"""Nemotron-4 and Minitron. Its norms are stored with the 1 that the family adds."""

from ridgeline.spec.gguf.common import Shapes, plus_one_tensors, read_common
from ridgeline.spec.reader import ConfigReader

tensors = plus_one_tensors


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    common = read_common(metadata, shapes, layer_norm=True)
    return {
        "model_type": "nemotron",
        "norm_eps": common.pop("layer_norm_eps"),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        **common,
    }
