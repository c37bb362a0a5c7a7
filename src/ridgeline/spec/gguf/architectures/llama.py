"""Llama, and the many models of its shape: Mistral, TinyLlama, SmolLM, Yi; with experts, Mixtral."""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.gguf.common import Shapes, Stored, expert_tensors, llama_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GroupedQueryAttention


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    num_experts = metadata.integer("expert_count", 0, low=0)
    num_used = metadata.integer("expert_used_count", 0, low=0)
    common = read_common(metadata, shapes)
    head_dim = common["head_dim"]
    assert isinstance(head_dim, int)
    if head_dim % 2 or common["partial_rotary_factor"] != 1.0:  # the rows of a head are stored in pairs
        raise ConfigError(f"head size {head_dim}: it must be even, and rope.dimension_count the same")
    if num_experts:
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": num_used}
        return {"model_type": "mixtral", **experts, **common}
    return {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        **common,
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    attention = spec.layers[0].mixer
    assert isinstance(attention, GroupedQueryAttention)
    return [*llama_tensors(paired_rows=attention.head_dim), *expert_tensors()]
