"""Gemma 2. Its norms are stored with the 1 that the family adds."""

from collections.abc import Mapping

from ridgeline.spec.gguf.common import Shapes, plus_one_tensors, read_common
from ridgeline.spec.reader import ConfigReader

tensors = plus_one_tensors


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    common = read_common(metadata, shapes)
    return {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scalar(common, layers_of_27b=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        **common,
    }


def query_scalar(common: Mapping[str, object], *, layers_of_27b: int) -> int:
    """Return the size of a head, or another number for the 27B, which is known by its number of layers alone."""
    hidden, heads, head_dim = (common[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    assert isinstance(head_dim, int)
    return hidden // heads if common["num_hidden_layers"] == layers_of_27b else head_dim
