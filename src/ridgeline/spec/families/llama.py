"""Llama 1 to 3.x, and what shares its layout (TinyLlama, SmolLM2): RMSNorm, rotary attention, SiLU-gated MLP."""

from ridgeline.spec.common import read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("rope_interleaved", False)
    config.ignore("is_llama_config")  # written by the SmolLM2 training library
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return read_llama(config, rms_norm(config), bias=bias, mlp_bias=mlp_bias, positions=2048)
