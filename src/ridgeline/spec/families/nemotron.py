"""Nemotron-4 and Minitron: LayerNorm whose weight is stored from 1, half of each head rotated, squared ReLU."""

from ridgeline.spec.common import ACTIVATIONS, decoder, read_attention, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, LayerNorm, Mlp


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = LayerNorm(config.number("norm_eps", 1e-5, low=0.0), unit_offset=True)
    attention = read_attention(config, head_dim, read_rope(config, head_dim, default_partial=0.5), bias=bias)
    mlp = Mlp(
        config.integer("intermediate_size"),
        config.choice("hidden_act", ACTIVATIONS, "relu2"),
        config.flag("mlp_bias", False),
    )
    return decoder(config, Layer(attention, mlp, norm, norm), norm, positions=4096)
