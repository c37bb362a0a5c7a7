"""Mixtral: Mistral with eight experts in place of the feed-forward, of which every token uses two."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_EXPERTS,
    MAX_LAYERS,
    expert_renames,
    llama_renames,
    read_attention,
    read_head_dim,
    read_rope,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, MixtureOfExperts, Rename, RmsNorm, Routing
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_theta=1e6)),
        window=config.optional_integer("sliding_window"),
    )
    experts = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", 8, high=MAX_EXPERTS),
        size=config.integer("intermediate_size"),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        routing=Routing(config.integer("num_experts_per_tok", 2)),
    )
    return DecoderSpec(
        model_type="mixtral",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=(Layer(attention, experts, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*llama_renames(), *expert_renames("block_sparse_moe", gate="w1", up="w3", down="w2")]


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    num_experts = choose(1, 3, 8)
    return {
        "model_type": "mixtral",
        **attention,
        "num_local_experts": num_experts,
        "num_experts_per_tok": choose(1, min(2, num_experts), num_experts),
        "sliding_window": choose(None, 4, 64),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
