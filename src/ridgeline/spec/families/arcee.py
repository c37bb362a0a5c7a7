"""Arcee's AFM: Llama with a squared ReLU instead of a gate."""

from ridgeline.spec.common import ACTIVATIONS, decoder, read_attention, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, Mlp, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = read_attention(config, head_dim, read_rope(config, head_dim), bias=bias)
    mlp = Mlp(
        config.integer("intermediate_size"),
        config.choice("hidden_act", ACTIVATIONS, "relu2"),
        config.flag("mlp_bias", False),
    )
    return decoder(config, Layer(attention, mlp, norm, norm), norm, positions=4096)
