"""Qwen 3 with experts in every layer."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "qwen3_moe",
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # every released model does, and no key says
        **read_common(metadata, shapes),
    }
