"""Families with multi-head latent attention share this: reading it, and its tensor names."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import module_renames
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, LatentAttention, Rename, RmsNorm, Rope, YarnRope

LATENT_NORM = RmsNorm(1e-6)  # whatever rms_norm_eps says
MAX_RANK = 1 << 14


def read_latent_attention(config: ConfigReader, *, interleaved: bool) -> LatentAttention:
    """Read the mixer of a config that spells its sizes as DeepSeek's do; `interleaved`: pairs of a head are rotated."""
    heads = config.integer("num_attention_heads", high=1 << 12)
    if config.integer("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"config.json: num_key_value_heads must be num_attention_heads ({heads}): every head has its own part of "
            "the latent"
        )
    nope, rope_dim = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    config.expect("head_dim", rope_dim, None)
    config.expect("qk_head_dim", nope + rope_dim, None)
    rope = replace(read_rope(config, rope_dim), interleaved=interleaved)
    return LatentAttention(
        num_heads=heads,
        kv_rank=config.integer("kv_lora_rank", 512, high=MAX_RANK),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim", 128),
        scale=(nope + rope_dim) ** -0.5 * _temperature(rope),
        rope=rope,
        norm=LATENT_NORM,
        q_rank=config.optional_integer("q_lora_rank", 1536, high=MAX_RANK),
        bias=config.flag("attention_bias", False),
    )


def _temperature(rope: Rope) -> float:
    """Compute YaRN's factor on the logits where the config sets it for all entries of a key, rotated or not; else 1."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnRope) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def latent_renames(spec: DecoderSpec) -> Sequence[Rename]:
    """Return the renames of latent attention, with a compressed query or without."""
    prefix, to = "model.layers.{i}.self_attn", "layers.{i}.attn"
    compressed = any(isinstance(layer.mixer, LatentAttention) and layer.mixer.q_rank for layer in spec.layers)
    names = {
        ("q_b_proj" if compressed else "q_proj"): "q",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_up",
        "q_a_layernorm": "q_norm",
        "q_a_proj": "q_down",
        "kv_a_proj_with_mqa": "kv_down",
    }
    return module_renames({f"{prefix}.{source}": f"{to}.{target}" for source, target in names.items()})
