"""ERNIE 4.5 (dense): Llama with pairs of each head rotated, and one switch for all biases."""

from dataclasses import replace

from ridgeline.spec.common import TIED, decoder, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("use_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    rope = replace(read_rope(config, head_dim, default_theta=500000.0), interleaved=True)
    attention = read_attention(config, head_dim, rope, bias=bias)
    mlp = read_gated_mlp(config, bias=bias)
    return decoder(config, Layer(attention, mlp, norm, norm), norm, positions=131072, head=TIED)
