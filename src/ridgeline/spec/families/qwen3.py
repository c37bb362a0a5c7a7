"""Qwen 3 (dense): Llama with RMSNorm on every query and key head, and sliding windows in the upper layers if asked."""

from dataclasses import replace

from ridgeline.spec.common import decoder, read_attention, read_gated_mlp, read_rope
from ridgeline.spec.families.qwen2 import read_qwen_windows
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    head_dim = config.integer("head_dim", 128, high=1024)
    bias = config.flag("attention_bias", False)
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim), bias=bias),
        num_kv_heads=config.integer("num_key_value_heads"),
        qk_norm=norm,
    )
    mlp = read_gated_mlp(config)
    layers = [Layer(replace(attention, window=window), mlp, norm, norm) for window in read_qwen_windows(config)]
    return decoder(config, layers, norm)
