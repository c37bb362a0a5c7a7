"""Helium 1: Llama with pairs of each head rotated."""

from dataclasses import replace

from ridgeline.spec.common import decoder, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-8, low=0.0))
    rope = replace(read_rope(config, head_dim, default_theta=100000.0), interleaved=True)
    attention = replace(read_attention(config, head_dim, rope), qkv_bias=bias)
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    return decoder(config, Layer(attention, mlp, norm, norm), norm, positions=4096)
