"""Qwen 3 with experts: Qwen 3's attention; layers may keep a dense feed-forward."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_EXPERTS,
    expert_renames,
    llama_renames,
    read_attention,
    read_head_dim,
    read_rope,
    read_sparse_layers,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Head, Layer, MixtureOfExperts, Rename, RmsNorm, Routing
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_rope, tiny_sizes, tiny_sparse_layers


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    bias = config.flag("attention_bias", False)
    window = config.optional_integer("sliding_window", 4096)
    config.ignore("max_window_layers")  # the window is that of every layer
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim), bias=bias),
        num_kv_heads=config.integer("num_key_value_heads"),
        qk_norm=norm,
        window=window if config.flag("use_sliding_window", False) else None,
    )
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    dense = GatedMlp(config.integer("intermediate_size", 6144), activation)
    experts = MixtureOfExperts(
        num_experts=config.integer(
            "num_experts" if config.has("num_experts") else "num_local_experts", 128, high=MAX_EXPERTS
        ),
        size=config.integer("moe_intermediate_size", 768),
        activation=activation,
        routing=Routing(config.integer("num_experts_per_tok", 8), normalize=config.flag("norm_topk_prob", False)),
    )
    return DecoderSpec(
        model_type="qwen3_moe",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=tuple(
            Layer(attention, experts if sparse else dense, norm, norm) for sparse in read_sparse_layers(config)
        ),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*llama_renames(), *expert_renames()]


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    num_experts = choose(2, 5, 16)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "qwen3_moe",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": choose(False, True),
        "use_sliding_window": choose(False, False, True),
        "sliding_window": choose(4, 64),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, 2, min(8, num_experts)),
        "moe_intermediate_size": choose(12, 40),
        "norm_topk_prob": choose(False, True),
        **tiny_sparse_layers(choose, sizes),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
