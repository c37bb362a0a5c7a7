"""StableLM 2 and 3B."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    metadata.ignore("use_parallel_residual")  # written wrongly at times; a second norm tells
    return {
        "model_type": "stablelm",
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes,
        "use_qkv_bias": "blk.0.attn_q.bias" in shapes,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in shapes,
        **read_common(metadata, shapes, layer_norm=True, free_head_dim=False),
    }
