"""Qwen 1.5 and 2 with experts: Qwen 2's attention; a shared expert behind a gate beside those that are chosen."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    decoder,
    read_attention,
    read_head_dim,
    read_moe,
    read_rope,
    read_sparse_layers,
    read_windows,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim)),
        qkv_bias=config.flag("qkv_bias", True),
    )
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    dense = GatedMlp(config.integer("intermediate_size", 5632), activation)
    experts = replace(
        read_moe(config, num_experts=60, size=1408, top_k=4),
        shared=GatedMlp(config.integer("shared_expert_intermediate_size", 5632), activation),
        shared_gate=True,
    )
    layers = [
        Layer(replace(attention, window=window), experts if sparse else dense, norm, norm)
        for window, sparse in zip(_windows(config), read_sparse_layers(config), strict=True)
    ]
    return decoder(config, layers, norm)


def _windows(config: ConfigReader) -> Sequence[int | None]:
    """Read the windows: without layer_types every other layer slides, of the first `max_window_layers`."""
    window = config.optional_integer("sliding_window", 4096, low=0) or None
    if not config.flag("use_sliding_window", False):
        window = None
    end = config.integer("max_window_layers", 28, low=0)
    return read_windows(config, window, lambda index: window is not None and index % 2 == 0 and index < end)
