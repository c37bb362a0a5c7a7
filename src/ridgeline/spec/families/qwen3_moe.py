"""Qwen 3 with experts: Qwen 3's attention; layers may keep a dense feed-forward."""

from ridgeline.spec.common import read_llama, read_moe, read_sparse, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    norm, window = rms_norm(config), config.optional_integer("sliding_window", 4096)
    config.ignore("max_window_layers")  # the window is that of every layer
    count_key = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = read_moe(config, num_experts=128, size=768, top_k=8, count_key=count_key)
    return read_llama(
        config,
        norm,
        bias=config.flag("attention_bias", False),
        num_kv_heads=config.integer("num_key_value_heads"),
        qk_norm=norm,
        window=window if config.flag("use_sliding_window", False) else None,
        ffn=read_sparse(config, experts, dense_size=6144),
    )
