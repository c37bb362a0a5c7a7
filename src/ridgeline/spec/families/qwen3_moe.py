"""Qwen 3 with experts: Qwen 3's attention; layers may keep a dense feed-forward."""

from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    decoder,
    read_attention,
    read_head_dim,
    read_moe,
    read_rope,
    read_sparse_layers,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Layer, RmsNorm


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
    dense = GatedMlp(config.integer("intermediate_size", 6144), config.choice("hidden_act", ACTIVATIONS, "silu"))
    count_key = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = read_moe(config, num_experts=128, size=768, top_k=8, count_key=count_key)
    layers = [Layer(attention, experts if sparse else dense, norm, norm) for sparse in read_sparse_layers(config)]
    return decoder(config, layers, norm)
