"""Nemotron-4 and Minitron: LayerNorm whose weight is stored from 1, half of each head rotated, squared ReLU."""

from ridgeline.spec.common import read_llama, read_mlp
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, LayerNorm


def read(config: ConfigReader) -> DecoderSpec:
    norm = LayerNorm(config.number("norm_eps", 1e-5, low=0.0), unit_offset=True)
    bias = config.flag("attention_bias", False)
    return read_llama(config, norm, partial=0.5, bias=bias, ffn=read_mlp(config, "relu2"), positions=4096)
