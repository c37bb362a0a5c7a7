"""EXAONE 4: norms behind each block and on queries and keys; where some layers slide the full ones do not rotate."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_pattern_windows,
    read_rope,
    read_windows,
)
from ridgeline.spec.families.olmo2 import renames as renames_of_olmo2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_layer_types, tiny_rope, tiny_sizes


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

    return DecoderSpec(
        model_type="exaone4",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=tuple(layer(layer_window) for layer_window in windows),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return renames_of_olmo2(spec)


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    sizes = tiny_sizes(choose)
    windows: list[dict[str, object]] = [
        {"sliding_window": None, "layer_types": ["full_attention"] * len(tiny_layer_types(choose, sizes))},
        {"sliding_window": choose(1, 4, 16, 64), "sliding_window_pattern": choose(2, 4)},
        {"sliding_window": choose(1, 4, 16, 64), "layer_types": tiny_layer_types(choose, sizes)},
    ]
    return {
        "model_type": "exaone4",
        **attention,
        **choose(*windows),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
