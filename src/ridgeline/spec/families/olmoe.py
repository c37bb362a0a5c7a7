"""OLMoE: sixty-four small experts in every layer; queries and keys are normalised before they are cut into heads."""

from dataclasses import replace

from ridgeline.spec.common import decoder, head_size, read_attention, read_moe, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


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
    experts = read_moe(config, num_experts=64, size=2048, top_k=8, size_key="intermediate_size")
    return decoder(config, Layer(attention, experts, norm, norm), norm, positions=4096)
