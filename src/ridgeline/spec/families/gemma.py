"""Gemma 1: Llama with scaled embeddings, norm weights stored from 1 and a GELU gate."""

from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, TIED, decoder, read_attention, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, GatedMlp, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    config.expect("use_bidirectional_attention", None, False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0), unit_offset=True)
    attention = read_attention(config, head_dim, read_rope(config, head_dim), bias=bias)
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    if activation == "gelu":
        activation = "gelu_tanh"  # the first configs said gelu and meant this
    mlp = GatedMlp(config.integer("intermediate_size"), activation)
    spec = decoder(config, Layer(attention, mlp, norm, norm), norm, positions=8192, head=TIED)
    return replace(spec, embedding=Embedding(scale=spec.hidden_size**0.5))
