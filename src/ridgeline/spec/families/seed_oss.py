"""Seed-OSS: Llama with a switch of its own for the output projection's bias."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import MAX_LAYERS, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    config.ignore("residual_dropout")  # training only
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim)),
        qkv_bias=config.flag("attention_bias", True),
        out_bias=config.flag("attention_out_bias", False),
    )
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    return DecoderSpec(
        model_type="seed_oss",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 524288),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "seed_oss",
        **attention,
        "hidden_act": choose("silu", "gelu_pytorch_tanh"),
        "attention_bias": choose(False, True),
        "attention_out_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
