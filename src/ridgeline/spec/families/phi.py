"""Phi 1, 1.5 and 2: parallel layers with one norm, partial rotation, and a bias wherever there can be one."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, decoder, head_size, module_renames, read_attention
from ridgeline.spec.common_rope import read_rope
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
    source, target = "model.layers.{i}", "layers.{i}"
    return module_renames(
        {
            "model.embed_tokens": "embed",
            "model.final_layernorm": "final_norm",
            "lm_head": "head",
            f"{source}.input_layernorm": f"{target}.mixer_norm",
            **{f"{source}.self_attn.{letter}_proj": f"{target}.attn.{letter}" for letter in "qkv"},
            **{f"{source}.self_attn.{letter}_layernorm": f"{target}.attn.{letter}_norm" for letter in "qk"},
            f"{source}.self_attn.dense": f"{target}.attn.o",
            f"{source}.mlp.fc1": f"{target}.ffn.up",
            f"{source}.mlp.fc2": f"{target}.ffn.down",
        }
    )
