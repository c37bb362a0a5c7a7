"""Llama 1 to 3.x: RMSNorm, rotary grouped-query attention, SiLU-gated feed-forward."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, llama_renames, read_rope
from ridgeline.spec.families import Choose
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, GroupedQueryAttention, Head, Layer, Rename, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", max(hidden // heads, 1), high=1024)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = GroupedQueryAttention(
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = GatedMlp(
        config.integer("intermediate_size"),
        config.choice("hidden_act", ACTIVATIONS, "silu"),
        config.flag("mlp_bias", False),
    )
    return DecoderSpec(
        model_type="llama",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=1000),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames(spec)


def tiny(choose: Choose) -> dict[str, object]:
    heads = choose(1, 2, 4)
    return {
        "model_type": "llama",
        "vocab_size": choose(97, 256),
        "hidden_size": choose(32, 48),
        "intermediate_size": choose(40, 64),
        "num_hidden_layers": 2,
        "num_attention_heads": heads * choose(1, 2, 8),
        "num_key_value_heads": heads,
        "head_dim": choose(8, 16, 64, 256),
        "max_position_embeddings": 128,
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        "tie_word_embeddings": choose(False, True),
    }
