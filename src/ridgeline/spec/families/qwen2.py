"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and sliding windows in the upper layers if asked."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import decoder, read_attention, read_gated_mlp, read_head_dim, read_rope, read_windows
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    config.expect("use_mrope", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim)),
        num_kv_heads=config.integer("num_key_value_heads"),
        qkv_bias=True,
    )
    mlp = read_gated_mlp(config)
    layers = [Layer(replace(attention, window=window), mlp, norm, norm) for window in read_qwen_windows(config)]
    return decoder(config, layers, norm)


def read_qwen_windows(config: ConfigReader) -> Sequence[int | None]:
    """Read the windows of Qwen 2 and 3: `use_sliding_window` allows any; they begin at layer `max_window_layers`."""
    window = config.optional_integer("sliding_window", 4096)
    if not config.flag("use_sliding_window", False):
        window = None
    first = config.integer("max_window_layers", 28, low=0)
    return read_windows(config, window, lambda index: window is not None and index >= first)
