"""Qwen 1.5 and 2 with experts, and one that all tokens share."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "qwen2_moe",
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # no released model does, and no key says
        **read_common(metadata, shapes),
    }
