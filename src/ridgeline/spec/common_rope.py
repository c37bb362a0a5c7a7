"""Families with rotary positions share this: reading a rope in either spelling of the published configs."""

from ridgeline.core.errors import ConfigError
from ridgeline.spec.parts import DynamicRope, LinearRope, Llama3Rope, LongRope, PlainRope, Rope, RopeScaling, YarnRope
from ridgeline.spec.reader import ConfigReader


def read_rope(
    config: ConfigReader, head_dim: int, *, default_theta: float = 10000.0, default_partial: float = 1.0
) -> Rope:
    """Read the rope of a config, in either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`.

    Raises ConfigError for an unknown rope type or parameter.
    """
    max_positions = config.integer("max_position_embeddings", 2048)
    theta = config.number("rope_theta", default_theta, low=1.0)
    partial = config.number("partial_rotary_factor", default_partial, low=0.0, high=1.0)
    original = config.optional_integer("original_max_position_embeddings")
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new is not None and old is not None:
        raise ConfigError("config.json: rope_parameters and rope_scaling are both present; keep one")
    section = new or old
    if section is None:
        return Rope(theta, int(head_dim * partial))
    nested = section.optional_integer("original_max_position_embeddings")
    if nested and original and nested != original:
        raise ConfigError(
            f"config.json: original_max_position_embeddings is {original}, but {nested} within the rope "
            "parameters; keep one"
        )
    return _read_section(section, theta, partial, head_dim, max_positions, nested or original)


def read_alpha_rope(config: ConfigReader, head_dim: int) -> Rope:
    """Read as read_rope does; dynamic with `alpha` stretches the base for any length: theta * alpha^(d / (d - 2))."""
    for key in ("rope_scaling", "rope_parameters"):
        section = config.section(key)
        if section is None or not section.has("alpha"):
            continue
        alpha = section.number("alpha", low=1e-6)
        theta = section.number("rope_theta", config.number("rope_theta", 10000.0, low=1.0), low=1.0)
        for spelling in ("type", "rope_type"):
            section.expect(spelling, "dynamic")
        section.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # beside alpha they do nothing
        section.finish()
        if head_dim <= 2:
            raise ConfigError(f"{key}.alpha needs heads of more than 2 entries, got {head_dim}")
        return Rope(theta * alpha ** (head_dim / (head_dim - 2)), head_dim)
    return read_rope(config, head_dim)


def read_local_global_ropes(
    config: ConfigReader, head_dim: int, *, local_theta: float | None, global_theta: float
) -> tuple[Rope, Rope]:
    """Read the ropes of sliding and of full layers, which `rope_parameters` may give by kind of layer.

    Else full layers have what read_rope reads, and sliding ones a plain rope with `rope_local_base_freq`, without
    `local_theta` with the full ones' theta. Raises as read_rope does.
    """
    by_kind = config.section("rope_parameters")
    if by_kind is None or not (by_kind.has("full_attention") or by_kind.has("sliding_attention")):
        full = read_rope(config, head_dim, default_theta=global_theta)
        theta = full.theta if local_theta is None else config.number("rope_local_base_freq", local_theta, low=1.0)
        return Rope(theta, full.rotary_dim), full
    max_positions = config.integer("max_position_embeddings", 2048)
    ropes: list[Rope] = []
    for kind, theta in (("sliding_attention", local_theta or global_theta), ("full_attention", global_theta)):
        section = by_kind.section(kind)
        original = section.optional_integer("original_max_position_embeddings") if section else None
        ropes.append(
            _read_section(section, theta, 1.0, head_dim, max_positions, original) if section else Rope(theta, head_dim)
        )
    by_kind.finish()
    return ropes[0], ropes[1]


def _read_section(
    section: ConfigReader, theta: float, partial: float, head_dim: int, max_positions: int, original: int | None
) -> Rope:
    """Read the rope of a section of parameters; `theta` and `partial` are the defaults."""
    theta = section.number("rope_theta", theta, low=1.0)
    partial = section.number("partial_rotary_factor", partial, low=0.0, high=1.0)
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
                beta_fast=section.number("beta_fast", 32.0, low=1e-6),
                beta_slow=section.number("beta_slow", 1.0, low=1e-6),
                attention_factor=section.optional_number("attention_factor"),
                mscale=section.optional_number("mscale"),
                mscale_all_dim=section.optional_number("mscale_all_dim"),
                truncate=section.flag("truncate", True),
            )
        case "longrope" | "su":
            if original is None:
                raise ConfigError("config.json: rope type longrope needs original_max_position_embeddings")
            return LongRope(
                short_factor=section.positive_numbers("short_factor"),
                long_factor=section.positive_numbers("long_factor"),
                original_context=original,
                attention_factor=section.optional_number("attention_factor"),
                factor=section.number("factor", max_positions / original, low=1e-6),
            )
        case _:
            raise ConfigError(
                f"config.json: rope type {kind!r} is not supported (default, linear, dynamic, llama3, yarn, longrope)"
            )
