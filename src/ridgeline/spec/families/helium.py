"""Helium 1: Llama with pairs of each head rotated."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import MAX_LAYERS, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-8, low=0.0))
    rope = replace(read_rope(config, head_dim, default_theta=100000.0), interleaved=True)
    attention = replace(read_attention(config, head_dim, rope), qkv_bias=bias)
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    return DecoderSpec(
        model_type="helium",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 4096),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    return {
        "model_type": "helium",
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": choose("silu", "gelu_pytorch_tanh"),
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
