"""OLMo 3: OLMo 2 with sliding windows in three layers of four; only full layers stretch their positions."""

from dataclasses import replace

from ridgeline.spec.common import (
    decoder,
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_local_global_ropes,
    read_windows,
)
from ridgeline.spec.families import olmo2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, RmsNorm

renames = olmo2.renames


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    local_rope, global_rope = read_local_global_ropes(config, head_dim, local_theta=None, global_theta=500000.0)
    attention = replace(
        read_attention(config, head_dim, global_rope, bias=bias),
        qk_norm=norm,
        qk_norm_over="row",
    )
    mlp = read_gated_mlp(config)
    windows = read_windows(config, config.optional_integer("sliding_window", 4096), lambda index: (index + 1) % 4 != 0)

    def layer(window: int | None) -> Layer:
        mixer = replace(attention, window=window, rope=local_rope) if window else attention
        return Layer(mixer, mlp, mixer_post_norm=norm, ffn_post_norm=norm)

    return decoder(config, [layer(window) for window in windows], norm, positions=2048)
