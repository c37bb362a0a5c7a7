"""Llama 1 to 3.x, and what shares its layout (TinyLlama, SmolLM2): RMSNorm, rotary attention, SiLU-gated MLP."""

from ridgeline.spec.common import decoder, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    config.expect("rope_interleaved", False)
    config.ignore("is_llama_config")  # written by the SmolLM2 training library
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = read_attention(config, head_dim, read_rope(config, head_dim), bias=bias)
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    return decoder(config, Layer(attention, mlp, norm, norm), norm, positions=2048)
