"""OLMoE: sixty-four small experts in every layer; queries and keys are normalised before they are cut into heads."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_EXPERTS,
    MAX_LAYERS,
    expert_renames,
    head_size,
    llama_renames,
    read_attention,
    read_rope,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, MixtureOfExperts, Rename, RmsNorm, Routing
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = head_size(hidden, heads)
    config.expect("clip_qkv", None)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    bias = config.flag("attention_bias", False)
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim), bias=bias),
        qk_norm=norm,
        qk_norm_over="row",
    )
    experts = MixtureOfExperts(
        num_experts=config.integer("num_experts", 64, high=MAX_EXPERTS),
        size=config.integer("intermediate_size", 2048),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        routing=Routing(config.integer("num_experts_per_tok", 8), normalize=config.flag("norm_topk_prob", False)),
    )
    return DecoderSpec(
        model_type="olmoe",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 4096),
        layers=(Layer(attention, experts, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*llama_renames(), *expert_renames()]


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    num_experts = choose(2, 5, 16)
    return {
        "model_type": "olmoe",
        **attention,
        "attention_bias": choose(False, True),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, 2, min(8, num_experts)),
        "norm_topk_prob": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
