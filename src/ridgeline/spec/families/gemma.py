"""Gemma 1: Llama with scaled embeddings, norm weights stored from 1 and a GELU gate."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, llama_renames, read_attention, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, GatedMlp, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    hidden, head_dim = config.integer("hidden_size"), read_head_dim(config)
    bias = config.flag("attention_bias", False)
    config.expect("use_bidirectional_attention", None, False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0), unit_offset=True)
    attention = read_attention(config, head_dim, read_rope(config, head_dim), bias=bias)
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    if activation == "gelu":
        activation = "gelu_tanh"  # the first configs said gelu and meant this
    mlp = GatedMlp(config.integer("intermediate_size"), activation)
    return DecoderSpec(
        model_type="gemma",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 8192),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", True)),
        embedding=Embedding(scale=hidden**0.5),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "gemma",
        **attention,
        "hidden_act": choose("gelu_pytorch_tanh", "gelu", "silu"),
        "attention_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
