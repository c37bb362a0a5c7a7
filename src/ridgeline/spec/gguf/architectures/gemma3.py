"""Gemma 3, text alone. Its norms are stored with the 1 that the family adds."""

from ridgeline.spec.gguf.architectures.gemma2 import query_scalar
from ridgeline.spec.gguf.common import Shapes, plus_one_tensors, read_common
from ridgeline.spec.reader import ConfigReader

tensors = plus_one_tensors


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    common = read_common(metadata, shapes)
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": query_scalar(common, layers_of_27b=62),
        "final_logit_softcapping": metadata.optional_number("final_logit_softcapping", low=0.0) or None,
        "sliding_window": metadata.optional_integer("attention.sliding_window", low=0) or None,
        "sliding_window_pattern": metadata.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0, low=1.0),
        **common,
    }
