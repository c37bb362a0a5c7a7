"""Arcee's AFM: Llama with a squared ReLU instead of a gate."""

from ridgeline.spec.common import read_llama, read_mlp, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    return read_llama(config, rms_norm(config, 1e-5), bias=bias, ffn=read_mlp(config, "relu2"), positions=4096)
