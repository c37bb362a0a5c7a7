"""SmolLM3: Llama without positions in every fourth layer, which are also the ones that slide if any do."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import (
    MAX_LAYERS,
    llama_renames,
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_rope,
    read_windows,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_by_layer, tiny_layer_types, tiny_rope, tiny_sizes


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

    return DecoderSpec(
        model_type="smollm3",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 32768),
        layers=tuple(layer(index) for index in range(len(windows))),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", True)),
    )


def _rotating_layers(config: ConfigReader) -> Sequence[bool]:
    """`no_rope_layers` has 1 for a layer that does rotate; without it each `no_rope_layer_interval`-th does not."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    interval = config.integer("no_rope_layer_interval", 4)
    flags = config.integers("no_rope_layers", high=1)
    if flags and len(flags) != num_layers:
        raise ConfigError(f"config.json: no_rope_layers has {len(flags)} entries for {num_layers} layers")
    return [bool(flag) for flag in flags] or [(index + 1) % interval != 0 for index in range(num_layers)]


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "smollm3",
        **attention,
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        "no_rope_layers": choose(None, tiny_by_layer(choose, sizes, 0, 1)),
        "no_rope_layer_interval": choose(2, 4),
        "use_sliding_window": choose(False, True),
        "sliding_window": choose(1, 4, 16, 64),
        "layer_types": choose(None, tiny_layer_types(choose, sizes)),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
