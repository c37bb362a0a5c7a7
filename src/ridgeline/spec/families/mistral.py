"""Mistral 7B and its successors of the same type: Llama with a sliding window in every layer, or in none."""

from ridgeline.spec.common import read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    window = config.optional_integer("sliding_window", 4096)  # null: full attention
    return read_llama(config, rms_norm(config), num_kv_heads=config.integer("num_key_value_heads"), window=window)
