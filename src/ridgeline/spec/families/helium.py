"""Helium 1: Llama with pairs of each head rotated."""

from ridgeline.spec.common import read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    norm, bias, mlp_bias = rms_norm(config, 1e-8), config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return read_llama(config, norm, theta=100000.0, interleaved=True, qkv_bias=bias, mlp_bias=mlp_bias, positions=4096)
