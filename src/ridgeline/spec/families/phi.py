"""Phi 1, 1.5 and 2: parallel layers with one norm, partial rotation, and a bias wherever there can be one."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, decoder, head_size, module_renames, read_attention, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, Mlp, ParallelLayer, Rename


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = head_size(hidden, heads)
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_partial=0.5), bias=True),
        qk_norm=norm if config.flag("qk_layernorm", False) else None,
    )
    mlp = Mlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu_new"))
    return decoder(config, ParallelLayer(attention, mlp, norm), norm, positions=2048, head=Head(tied=False, bias=True))


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
