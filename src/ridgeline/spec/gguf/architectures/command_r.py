"""Command R and Aya."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "cohere",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "logit_scale": metadata.number("logit_scale"),
        **read_common(metadata, shapes, layer_norm=True),
    }
