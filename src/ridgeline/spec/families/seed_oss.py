"""Seed-OSS: Llama with a switch of its own for the output projection's bias."""

from dataclasses import replace

from ridgeline.spec.common import decoder, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    config.ignore("residual_dropout")  # training only
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim)),
        qkv_bias=config.flag("attention_bias", True),
        out_bias=config.flag("attention_out_bias", False),
    )
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    return decoder(config, Layer(attention, mlp, norm, norm), norm, positions=524288)
