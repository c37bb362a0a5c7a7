"""Qwen 3 (dense): Llama with RMSNorm on every query and key head, and sliding windows in the upper layers if asked."""

from ridgeline.spec.common import read_llama, rms_norm
from ridgeline.spec.families.qwen2 import read_qwen_windows
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    norm = rms_norm(config)
    return read_llama(
        config,
        norm,
        head_dim=config.integer("head_dim", 128, high=1024),
        windows=read_qwen_windows(config),
        bias=config.flag("attention_bias", False),
        num_kv_heads=config.integer("num_key_value_heads"),
        qk_norm=norm,
    )
