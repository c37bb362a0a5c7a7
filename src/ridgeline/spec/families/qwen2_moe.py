"""Qwen 1.5 and 2 with experts: Qwen 2's attention; a shared expert behind a gate beside those that are chosen."""

from collections.abc import Sequence

from ridgeline.spec.common import read_llama, read_moe, read_sparse, read_windows, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    experts = read_moe(config, num_experts=60, size=1408, top_k=4, shared_size=5632)
    ffn, bias = read_sparse(config, experts, dense_size=5632), config.flag("qkv_bias", True)
    return read_llama(config, rms_norm(config), windows=_windows(config), qkv_bias=bias, ffn=ffn)


def _windows(config: ConfigReader) -> Sequence[int | None]:
    """Read the windows: without layer_types every other layer slides, of the first `max_window_layers`."""
    window = config.optional_integer("sliding_window", 4096, low=0) or None
    if not config.flag("use_sliding_window", False):
        window = None
    end = config.integer("max_window_layers", 28, low=0)
    return read_windows(config, window, lambda index: window is not None and index % 2 == 0 and index < end)
