"""Llama, and the many models of its shape: Mistral, TinyLlama, SmolLM, Yi; with experts, Mixtral."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, expert_tensors, paired_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    num_experts = metadata.integer("expert_count", 0, low=0)
    num_used = metadata.integer("expert_used_count", 0, low=0)
    common = read_common(metadata, shapes, paired=True)
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
    return [*paired_tensors(spec), *expert_tensors()]
