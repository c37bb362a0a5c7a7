"""Most families share this: reading heads, ropes, windows and the gated MLP, and the Llama tensor names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import (
    Activation,
    AnyLayer,
    DecoderSpec,
    DynamicRope,
    GatedMlp,
    GroupedQueryAttention,
    Head,
    LinearRope,
    Llama3Rope,
    LongRope,
    MixtureOfExperts,
    Norm,
    PlainRope,
    Rename,
    Rope,
    RopeScaling,
    Routing,
    YarnRope,
)

MAX_LAYERS = 1000  # far above any model, as is the next; they keep a hostile config from filling memory
MAX_EXPERTS = 1 << 12

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


UNTIED, TIED = Head(tied=False), Head(tied=True)


def decoder(
    config: ConfigReader,
    layers: AnyLayer | Sequence[AnyLayer],
    norm: Norm,
    *,
    vocab_size: int | None = None,
    positions: int | None = None,
    head: Head = UNTIED,
) -> DecoderSpec:
    """Return the decoder of a config that spells its vocabulary, width, positions and tying as most do.

    `layers`: each of them, or one that stands for all `num_hidden_layers`; `norm`: behind the last.
    `vocab_size`, `positions`, `head.tied`: what a config means that does not say; None: it must.
    """
    return DecoderSpec(
        model_type=config.text("model_type"),
        vocab_size=config.integer("vocab_size", vocab_size),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", positions),
        layers=tuple(layers)
        if isinstance(layers, Sequence)
        else (layers,) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=replace(head, tied=config.flag("tie_word_embeddings", head.tied)),
    )


def head_size(hidden_size: int, num_heads: int) -> int:
    """Compute the head size of a config without `head_dim`. Raises ConfigError where the heads do not fit evenly."""
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: the hidden size ({hidden_size}) is not a multiple of the number of heads ({num_heads})"
        )
    return hidden_size // num_heads


def read_head_dim(config: ConfigReader) -> int:
    """Read the size of a head: `head_dim`, or, where it is absent, null or 0, the hidden size shared out evenly."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return config.optional_integer("head_dim", high=1024) or head_size(hidden, heads)


def read_attention(
    config: ConfigReader, head_dim: int, rope: Rope | None, *, bias: bool = False
) -> GroupedQueryAttention:
    """Read attention as most configs spell it; `bias`: of all four projections. A family replaces what differs."""
    heads = config.integer("num_attention_heads")
    return GroupedQueryAttention(
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
    )


def read_gated_mlp(config: ConfigReader, *, bias: bool = False) -> GatedMlp:
    """Read the gated feed-forward as most configs spell it; `bias`: of its three matrices."""
    return GatedMlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "silu"), bias)


def read_moe(
    config: ConfigReader,
    *,
    num_experts: int,
    size: int,
    top_k: int,
    normalize: bool = False,
    count_key: str = "num_experts",
    size_key: str = "moe_intermediate_size",
) -> MixtureOfExperts:
    """Return the experts of a config that spells them as Qwen's do; the numbers are what one means that does not say.

    `count_key`, `size_key`: the keys of the number of experts and of an expert's size.
    """
    return MixtureOfExperts(
        num_experts=config.integer(count_key, num_experts, high=MAX_EXPERTS),
        size=config.integer(size_key, size),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        routing=Routing(
            config.integer("num_experts_per_tok", top_k), normalize=config.flag("norm_topk_prob", normalize)
        ),
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the ALiBi slopes (arXiv 2108.12409): 2^(-8 i / n), i = 1..n, where the number of heads n is a power of 2.

    Otherwise those of the next lower power, and every other one of the next higher power's until there are enough.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    slopes += [2.0 ** (-8 * i / (2 * lower)) for i in range(1, 2 * lower, 2)]
    return tuple(slopes[:num_heads])


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


def read_windows(
    config: ConfigReader, window: int | None, sliding_by_default: Callable[[int], bool]
) -> Sequence[int | None]:
    """Read the attention window of each layer: `window` where `layer_types` says sliding, None where it says full.

    `sliding_by_default`: which layers slide in a config without layer_types. Raises ConfigError where the list has
    the wrong length, names another kind of layer, or a layer slides and there is no window.
    """
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if config.has("layer_types"):
        types = config.texts("layer_types")
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != num_layers:
            raise ConfigError(
                f"config.json: layer_types must name full_attention or sliding_attention for each of {num_layers} "
                f"layers; it has {len(types)} entries" + (f" and {', '.join(map(repr, unknown))}" if unknown else "")
            )
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        config.ignore("layer_types")  # null
        sliding = [sliding_by_default(index) for index in range(num_layers)]
    if window is None and any(sliding):
        raise ConfigError("config.json: a layer has sliding attention, but there is no sliding_window")
    return [window if slides else None for slides in sliding]


def read_pattern_windows(config: ConfigReader, window: int | None, period: int) -> Sequence[int | None]:
    """Read the windows where every layer slides but each `sliding_window_pattern`-th one, by default `period`."""
    period = config.integer("sliding_window_pattern", period)
    return read_windows(config, window, lambda index: (index + 1) % period != 0)


def read_sparse_layers(config: ConfigReader) -> Sequence[bool]:
    """Read which layers have experts: every `decoder_sparse_step`-th, but for those of `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", 1), set(config.integers("mlp_only_layers"))
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def module_renames(names: Mapping[str, str | Sequence[str]], *, groups: int = 1) -> Sequence[Rename]:
    """Return renames of modules' weights and biases, each of which becomes one of the program's or is cut into several.

    What a module does not have is named too. `groups`: as in Rename.
    """
    return [
        Rename(f"{source}.{part}", tuple(f"{to}.{part}" for to in targets), groups=groups)
        for source, named in names.items()
        for targets in [(named,) if isinstance(named, str) else named]
        for part in ("weight", "bias")
    ]


def fused_renames(
    spec: DecoderSpec, outside: Mapping[str, str], at: str, layer: Mapping[str, str], qkv: str
) -> Sequence[Rename]:
    """Return the renames of modules `outside` the layers and of each `layer` at `at`, also for weights and biases.

    `qkv` is the layer's module of queries, keys and values, stored group by group of the queries that share a key.
    """
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, GroupedQueryAttention)
    names = {**outside, **{f"{at}.{source}": f"layers.{{i}}.{to}" for source, to in layer.items()}}
    cut = [f"layers.{{i}}.attn.{letter}" for letter in "qkv"]
    return [*module_renames(names), *module_renames({f"{at}.{qkv}": cut}, groups=mixer.num_kv_heads)]


def llama_renames(*instead: Rename) -> Sequence[Rename]:
    """Return the renames of the Llama layout; one in `instead` replaces Llama's for the same program weight."""
    replaced = {target for rename in instead for target in rename.targets}
    at, to = "model.layers.{i}", "layers.{i}"
    names = {
        "model.embed_tokens": "embed",
        "model.norm": "final_norm",
        "lm_head": "head",
        f"{at}.input_layernorm": f"{to}.mixer_norm",
        f"{at}.post_attention_layernorm": f"{to}.ffn_norm",
        **{f"{at}.self_attn.{letter}_proj": f"{to}.attn.{letter}" for letter in "qkvo"},
        **{f"{at}.self_attn.{letter}_norm": f"{to}.attn.{letter}_norm" for letter in "qk"},
        **{f"{at}.mlp.{matrix}_proj": f"{to}.ffn.{matrix}" for matrix in ("gate", "up", "down")},
    }
    return [*(rename for rename in module_renames(names) if rename.targets[0] not in replaced), *instead]


def expert_renames(
    block: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    shared: str = "shared_expert",
) -> Sequence[Rename]:
    """Return the usual renames of a mixture of experts, each matrix of each expert in a tensor of its own.

    To be added to `llama_renames`, whose names are those of the dense layers that may stand between.
    """
    prefix, to = f"model.layers.{{i}}.{block}", "layers.{i}.ffn"
    names = [
        Rename(f"{prefix}.gate.weight", (f"{to}.router.weight",)),
        Rename(f"{prefix}.gate.e_score_correction_bias", (f"{to}.route.bias",)),
        Rename(f"{prefix}.shared_expert_gate.weight", (f"{to}.shared_gate.weight",)),
    ]
    for matrix, stored in (("gate", gate), ("up", up), ("down", down)):
        names.append(Rename(f"{prefix}.experts.{{e}}.{stored}.weight", (f"{to}.{matrix}.weight",), experts=True))
        names.append(Rename(f"{prefix}.{shared}.{stored}.weight", (f"{to}.shared.{matrix}.weight",)))
    return names
