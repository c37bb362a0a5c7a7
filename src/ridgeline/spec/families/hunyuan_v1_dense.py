"""Hunyuan dense, 0.5 B to 7 B: Llama with queries and keys normalised once rotated."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import MAX_LAYERS, read_alpha_rope, read_attention, read_gated_mlp, read_head_dim
from ridgeline.spec.families.hunyuan import renames as renames_of_hunyuan
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    config.ignore("eod_token_id")
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_alpha_rope(config, head_dim), bias=bias),
        qk_norm=norm,
        qk_norm_over="rotated head",
    )
    mlp = read_gated_mlp(config)
    return DecoderSpec(
        model_type="hunyuan_v1_dense",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return renames_of_hunyuan(spec)


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    alpha: dict[str, object] = {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    }
    return {
        "model_type": "hunyuan_v1_dense",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": choose("silu", "gelu_pytorch_tanh"),
        "attention_bias": choose(False, True),
        **tiny_sizes(choose),
        **choose(alpha, tiny_rope(choose, head_dim)),
    }
