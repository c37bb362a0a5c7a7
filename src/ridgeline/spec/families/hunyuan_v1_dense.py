"""Hunyuan dense, 0.5 B to 7 B: Llama with queries and keys normalised once rotated."""

from dataclasses import replace

from ridgeline.spec.common import decoder, read_alpha_rope, read_attention, read_gated_mlp, read_head_dim
from ridgeline.spec.families import hunyuan
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm

renames = hunyuan.renames


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    config.ignore("eod_token_id")
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_alpha_rope(config, head_dim), bias=bias),
        qk_norm=norm,
        qk_norm_over="rotated head",
    )
    mlp = read_gated_mlp(config)
    return decoder(config, Layer(attention, mlp, norm, norm), norm, positions=2048)
