"""What most families share: reading rope parameters, activations, and the Llama tensor names."""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import (
    Activation,
    DecoderSpec,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    PlainRope,
    Rename,
    Rope,
    RopeScaling,
    YarnRope,
)

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_rope(config: ConfigReader, head_dim: int, *, default_theta: float = 10000.0) -> Rope:
    """The rope of a config, in either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`.

    Raises ConfigError for an unknown rope type or parameter.
    """
    max_positions = config.integer("max_position_embeddings", 2048)
    theta = config.number("rope_theta", default_theta, low=1.0)
    partial = config.number("partial_rotary_factor", 1.0, low=0.0, high=1.0)
    original = config.optional_integer("original_max_position_embeddings")
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new is not None and old is not None:
        raise ConfigError("config.json: rope_parameters and rope_scaling are both present; keep one")
    section = new or old
    scaling: RopeScaling = PlainRope()
    if section is not None:
        theta = section.number("rope_theta", theta, low=1.0)
        partial = section.number("partial_rotary_factor", partial, low=0.0, high=1.0)
        original = section.optional_integer("original_max_position_embeddings") or original
        scaling = _read_scaling(section, max_positions, original)
        section.finish()
    return Rope(theta, int(head_dim * partial), scaling)


def _read_scaling(section: ConfigReader, max_positions: int, original: int | None) -> RopeScaling:
    legacy = section.text("type", "default")  # older checkpoints say `type`
    kind = section.text("rope_type", legacy)
    match kind:
        case "default":
            section.optional_number("factor")
            return PlainRope()
        case "linear":
            return LinearRope(section.number("factor", low=1e-6))
        case "dynamic":
            return DynamicRope(section.number("factor", low=1e-6), max_positions)
        case "llama3":
            return Llama3Rope(
                section.number("factor", low=1e-6),
                section.number("low_freq_factor"),
                section.number("high_freq_factor"),
                original or max_positions,
            )
        case "yarn":
            original = original or max_positions
            return YarnRope(
                factor=section.number("factor", max_positions / original, low=1e-6),
                original_context=original,
                beta_fast=section.number("beta_fast", 32.0),
                beta_slow=section.number("beta_slow", 1.0),
                attention_factor=section.optional_number("attention_factor"),
                mscale=section.optional_number("mscale"),
                mscale_all_dim=section.optional_number("mscale_all_dim"),
                truncate=section.flag("truncate", True),
            )
        case "longrope" | "su":
            original = original or max_positions
            return LongRope(
                short_factor=section.numbers("short_factor"),
                long_factor=section.numbers("long_factor"),
                original_context=original,
                attention_factor=section.optional_number("attention_factor"),
                factor=section.number("factor", max_positions / original, low=1e-6),
            )
        case _:
            raise ConfigError(
                f"config.json: rope type {kind!r} is not supported (default, linear, dynamic, llama3, yarn, longrope)"
            )


def llama_renames(spec: DecoderSpec) -> Sequence[Rename]:
    """Tensor names of the Llama layout; a family with other norms or fused tensors adds to or replaces these."""
    names = {
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "final_norm.weight",
        "lm_head.weight": "head.weight",
        "model.layers.{i}.input_layernorm.weight": "layers.{i}.mixer_norm.weight",
        "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.ffn_norm.weight",
    }
    for part in ("weight", "bias"):
        for letter in "qkvo":
            names[f"model.layers.{{i}}.self_attn.{letter}_proj.{part}"] = f"layers.{{i}}.attn.{letter}.{part}"
        for matrix in ("gate", "up", "down"):
            names[f"model.layers.{{i}}.mlp.{matrix}_proj.{part}"] = f"layers.{{i}}.ffn.{matrix}.{part}"
    for letter in "qk":
        names[f"model.layers.{{i}}.self_attn.{letter}_norm.weight"] = f"layers.{{i}}.attn.{letter}_norm.weight"
    return [Rename(source, (target,)) for source, target in names.items()]
