"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and sliding windows in the upper layers if asked."""

from collections.abc import Sequence

from ridgeline.spec.common import read_llama, read_windows, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("use_mrope", False)
    kv_heads, windows = config.integer("num_key_value_heads"), read_qwen_windows(config)
    return read_llama(config, rms_norm(config), windows=windows, num_kv_heads=kv_heads, qkv_bias=True)


def read_qwen_windows(config: ConfigReader) -> Sequence[int | None]:
    """Read the windows of Qwen 2 and 3: `use_sliding_window` allows any; they begin at layer `max_window_layers`."""
    window = config.optional_integer("sliding_window", 4096)
    if not config.flag("use_sliding_window", False):
        window = None
    first = config.integer("max_window_layers", 28, low=0)
    return read_windows(config, window, lambda index: window is not None and index >= first)
