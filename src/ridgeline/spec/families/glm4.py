"""GLM-4-0414: GLM with norms behind each block too."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import MAX_LAYERS, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.families.glm import renames as renames_of_glm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_partial_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1.5625e-7, low=0.0))
    rope = replace(read_rope(config, head_dim, default_partial=0.5), interleaved=True)
    attention = replace(read_attention(config, head_dim, rope), qkv_bias=config.flag("attention_bias", True))
    mlp = read_gated_mlp(config)
    return DecoderSpec(
        model_type="glm4",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 131072),
        layers=(Layer(attention, mlp, norm, norm, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    at = "layers.{i}"
    return [
        *renames_of_glm(spec),
        Rename(f"model.{at}.post_self_attn_layernorm.weight", (f"{at}.mixer_post_norm.weight",)),
        Rename(f"model.{at}.post_mlp_layernorm.weight", (f"{at}.ffn_post_norm.weight",)),
    ]


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "glm4",
        **attention,
        "attention_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_partial_rope(choose, head_dim),
    }
