"""Nemotron-4 and Minitron: LayerNorm whose weight is stored from 1, half of each head rotated, squared ReLU."""

from collections.abc import Sequence

from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_LAYERS,
    llama_renames,
    module_renames,
    read_attention,
    read_head_dim,
    read_rope,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, LayerNorm, Mlp, Rename
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_partial_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = LayerNorm(config.number("norm_eps", 1e-5, low=0.0), unit_offset=True)
    attention = read_attention(config, head_dim, read_rope(config, head_dim, default_partial=0.5), bias=bias)
    mlp = Mlp(
        config.integer("intermediate_size"),
        config.choice("hidden_act", ACTIVATIONS, "relu2"),
        config.flag("mlp_bias", False),
    )
    return DecoderSpec(
        model_type="nemotron",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 4096),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    at = "layers.{i}"
    names = {
        "model.norm": "final_norm",
        f"model.{at}.input_layernorm": f"{at}.mixer_norm",
        f"model.{at}.post_attention_layernorm": f"{at}.ffn_norm",
    }
    return llama_renames(*module_renames(names))


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    sizes = tiny_sizes(choose)
    sizes["norm_eps"] = sizes.pop("rms_norm_eps")
    return {
        "model_type": "nemotron",
        **attention,
        "hidden_act": choose("relu2", "gelu"),
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        **sizes,
        **tiny_partial_rope(choose, head_dim),
    }
