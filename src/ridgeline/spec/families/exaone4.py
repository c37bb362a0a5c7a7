"""EXAONE 4: norms behind each block and on queries and keys; where some layers slide the full ones do not rotate."""

from dataclasses import replace

from ridgeline.spec.common import (
    decoder,
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_pattern_windows,
    read_rope,
    read_windows,
)
from ridgeline.spec.families import olmo2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm

renames = olmo2.renames


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    rope = read_rope(config, head_dim)
    attention = replace(read_attention(config, head_dim, rope), qk_norm=norm)
    mlp = read_gated_mlp(config)
    window = config.optional_integer("sliding_window", 4096)
    if window is None or config.has("layer_types"):
        config.ignore("sliding_window_pattern")
        windows = read_windows(config, window, lambda index: False)
    else:
        windows = read_pattern_windows(config, window, 4)

    def layer(layer_window: int | None) -> Layer:
        rotates = window is None or layer_window is not None
        mixer = replace(attention, window=layer_window, rope=rope if rotates else None)
        return Layer(mixer, mlp, mixer_post_norm=norm, ffn_post_norm=norm)

    return decoder(config, [layer(layer_window) for layer_window in windows], norm, positions=2048)
