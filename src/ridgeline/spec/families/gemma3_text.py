"""Gemma 3, text alone: five local layers to a global one, a rope for each kind, RMSNorm on queries and keys."""

from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, read_pattern_windows
from ridgeline.spec.common_rope import read_local_global_ropes
from ridgeline.spec.families import gemma2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, GatedMlp, GroupedQueryAttention, Head, Layer, RmsNorm

renames = gemma2.renames


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("hidden_size", 2304)
    head_dim = config.integer("head_dim", 256, high=1024)
    bias = config.flag("attention_bias", False)
    config.expect("use_bidirectional_attention", None, False)
    config.ignore("hidden_act", "cache_implementation")  # hidden_activation counts; how transformers keeps its cache
    config.ignore("_sliding_window_pattern")  # written by transformers beside the layer_types that it made of it
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0), unit_offset=True)
    local_rope, global_rope = read_local_global_ropes(config, head_dim, local_theta=1e4, global_theta=1e6)
    attention = GroupedQueryAttention(
        num_heads=config.integer("num_attention_heads", 8),
        num_kv_heads=config.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        scale=config.number("query_pre_attn_scalar", 256, low=1e-6) ** -0.5,
        rope=global_rope,
        qk_norm=norm,
        softcap=config.optional_number("attn_logit_softcapping", low=1e-6),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = GatedMlp(
        config.integer("intermediate_size", 9216), config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    )

    def layer(window: int | None) -> Layer:
        mixer = replace(attention, window=window, rope=local_rope) if window else attention
        return Layer(mixer, mlp, norm, norm, norm, norm)

    windows = read_pattern_windows(config, config.optional_integer("sliding_window", 4096), 6)
    return DecoderSpec(
        model_type="gemma3_text",
        vocab_size=config.integer("vocab_size", 262_208),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 131_072),
        layers=tuple(layer(window) for window in windows),
        final_norm=norm,
        head=Head(
            tied=config.flag("tie_word_embeddings", True),
            softcap=config.optional_number("final_logit_softcapping", low=1e-6),
        ),
        embedding=Embedding(scale=hidden**0.5),
    )
