"""Mistral 7B and its successors of the same type: Llama with a sliding window in every layer, or in none."""

from dataclasses import replace

from ridgeline.spec.common import decoder, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim)),
        num_kv_heads=config.integer("num_key_value_heads"),
        window=config.optional_integer("sliding_window", 4096),  # null: full attention
    )
    mlp = read_gated_mlp(config)
    return decoder(config, Layer(attention, mlp, norm, norm), norm)
