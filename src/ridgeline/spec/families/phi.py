"""Phi 1, 1.5 and 2: parallel layers with one norm, partial rotation, and a bias wherever there can be one."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, head_size, module_renames, read_attention, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, Mlp, ParallelLayer, Rename
from ridgeline.spec.tiny import Choose, tiny_partial_rope


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = head_size(hidden, heads)
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_partial=0.5), bias=True),
        qk_norm=norm if config.flag("qk_layernorm", False) else None,
    )
    mlp = Mlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu_new"))
    return DecoderSpec(
        model_type="phi",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=(ParallelLayer(attention, mlp, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False), bias=True),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    at, to = "model.layers.{i}", "layers.{i}"
    return module_renames(
        {
            "model.embed_tokens": "embed",
            "model.final_layernorm": "final_norm",
            "lm_head": "head",
            f"{at}.input_layernorm": f"{to}.mixer_norm",
            **{f"{at}.self_attn.{letter}_proj": f"{to}.attn.{letter}" for letter in "qkv"},
            **{f"{at}.self_attn.{letter}_layernorm": f"{to}.attn.{letter}_norm" for letter in "qk"},
            f"{at}.self_attn.dense": f"{to}.attn.o",
            f"{at}.mlp.fc1": f"{to}.ffn.up",
            f"{at}.mlp.fc2": f"{to}.ffn.down",
        }
    )


def tiny(choose: Choose) -> dict[str, object]:
    kv_heads = choose(1, 2, 3)
    heads, head_dim = kv_heads * choose(1, 2), choose(16, 24, 64)
    return {
        "model_type": "phi",
        "vocab_size": choose(97, 131, 256),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": choose(1, 2, 3),
        "intermediate_size": choose(40, 72),
        "hidden_act": choose("gelu_new", "gelu", "relu"),
        "layer_norm_eps": choose(1e-5, 1e-3),
        "max_position_embeddings": choose(24, 128),
        "qk_layernorm": choose(False, True),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **tiny_partial_rope(choose, head_dim),
    }
