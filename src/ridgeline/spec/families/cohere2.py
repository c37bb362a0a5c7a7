"""Command R7B and Command A: Command R with three sliding layers to a full one, which has no positions."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    head_size,
    llama_renames,
    read_attention,
    read_gated_mlp,
    read_pattern_windows,
    read_rope,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, ParallelLayer, Rename
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_layer_types, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = head_size(hidden, heads)
    config.expect("head_dim", head_dim)
    config.expect("use_qk_norm", False)
    config.expect("use_embedding_sharing", True)
    config.expect("use_gated_activation", True)
    config.expect("use_parallel_block", True)
    config.expect("use_parallel_embedding", False)
    config.expect("position_embedding_type", "rope_gptj")
    config.expect("rotary_pct", 1.0)
    config.expect("order_of_interleaved_layers", "local_attn_first")
    config.ignore("cache_implementation", "layer_switch")  # of transformers' cache; the pattern, in another spelling
    config.ignore("_sliding_window_pattern")
    bias = config.flag("attention_bias", False)
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0), bias=False)
    rope = replace(read_rope(config, head_dim), interleaved=True)
    attention = read_attention(config, head_dim, None, bias=bias)
    mlp = read_gated_mlp(config)

    def layer(window: int | None) -> ParallelLayer:
        return ParallelLayer(replace(attention, window=window, rope=rope if window else None), mlp, norm)

    windows = read_pattern_windows(config, config.optional_integer("sliding_window", 4096), 4)
    return DecoderSpec(
        model_type="cohere2",
        vocab_size=config.integer("vocab_size", 256000),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 8192),
        layers=tuple(layer(window) for window in windows),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", True), scale=config.number("logit_scale", 0.0625)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    sizes = tiny_sizes(choose)
    sizes["layer_norm_eps"] = sizes.pop("rms_norm_eps")
    return {
        "model_type": "cohere2",
        **attention,
        "attention_bias": choose(False, True),
        "logit_scale": choose(0.0625, 0.8, 1.0),
        "sliding_window": choose(1, 4, 16, 64),
        **choose({"layer_types": tiny_layer_types(choose, sizes)}, {"sliding_window_pattern": choose(2, 4)}),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
