"""SmolLM3: Llama without positions in every fourth layer, which are also the ones that slide if any do."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import (
    MAX_LAYERS,
    TIED,
    decoder,
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_rope,
    read_windows,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_theta=2000000.0), bias=bias),
        num_kv_heads=config.integer("num_key_value_heads", 4),
    )
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    rotates = _rotating_layers(config)
    window = config.optional_integer("sliding_window")
    allowed = config.flag("use_sliding_window", False)
    windows = read_windows(config, window, lambda index: allowed and window is not None and not rotates[index])

    def layer(index: int) -> Layer:
        rope = attention.rope if rotates[index] else None
        return Layer(replace(attention, window=windows[index], rope=rope), mlp, norm, norm)

    return decoder(config, [layer(index) for index in range(len(windows))], norm, positions=32768, head=TIED)


def _rotating_layers(config: ConfigReader) -> Sequence[bool]:
    """Read which layers rotate: 1 in `no_rope_layers`, without it all but each `no_rope_layer_interval`-th."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    interval = config.integer("no_rope_layer_interval", 4)
    flags = config.integers("no_rope_layers", high=1)
    if flags and len(flags) != num_layers:
        raise ConfigError(f"config.json: no_rope_layers has {len(flags)} entries for {num_layers} layers")
    return [bool(flag) for flag in flags] or [(index + 1) % interval != 0 for index in range(num_layers)]
