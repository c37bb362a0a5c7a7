"""OLMo 3: OLMo 2 with sliding windows in three layers of four; only full layers stretch their positions."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import read_attention, read_gated_mlp, read_head_dim, read_local_global_ropes, read_windows
from ridgeline.spec.families.olmo2 import renames as renames_of_olmo2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_layer_types, tiny_local_global_ropes, tiny_sizes


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

    return DecoderSpec(
        model_type="olmo3",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=tuple(layer(window) for window in windows),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return renames_of_olmo2(spec)


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "olmo3",
        **attention,
        "attention_bias": choose(False, True),
        "sliding_window": choose(1, 4, 16, 64),
        "layer_types": tiny_layer_types(choose, sizes),
        **sizes,
        **tiny_local_global_ropes(choose, head_dim),
    }
