"""OLMoE."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "olmoe",
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "norm_topk_prob": False,  # no released model does, and no key says
        **read_common(metadata, shapes, free_head_dim=False),
    }
