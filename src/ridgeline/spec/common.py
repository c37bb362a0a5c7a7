"""Most families share this: reading models of Llama's shape, heads, windows and feed-forwards, and tensor names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.attention import GroupedQueryAttention
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.experts import MixtureOfExperts, Routing
from ridgeline.spec.parts import Activation, GatedMlp, Mlp, Norm, RmsNorm, Rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import AnyLayer, DecoderSpec, Embedding, FeedForward, Head, Layer, Rename, Renames

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


MakeLayer = Callable[[GroupedQueryAttention, FeedForward, Norm], AnyLayer]
UNTIED, TIED = Head(tied=False), Head(tied=True)


def decoder(
    config: ConfigReader,
    layers: AnyLayer | Sequence[AnyLayer],
    norm: Norm | None,
    *,
    vocab_size: int | None = None,
    positions: int | None = None,
    head: Head | None = UNTIED,
    embedding: Embedding = Embedding(),  # noqa: B008 - frozen
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
        head=head and replace(head, tied=config.flag("tie_word_embeddings", head.tied)),
        embedding=embedding,
    )


def pre_norms(attention: GroupedQueryAttention, ffn: FeedForward, norm: Norm) -> Layer:
    """Return Llama's layer: a norm before each half."""
    return Layer(attention, ffn, norm, norm)


def post_norms(attention: GroupedQueryAttention, ffn: FeedForward, norm: Norm) -> Layer:
    """Return a layer with a norm behind each half and none before."""
    return Layer(attention, ffn, mixer_post_norm=norm, ffn_post_norm=norm)


def four_norms(attention: GroupedQueryAttention, ffn: FeedForward, norm: Norm) -> Layer:
    """Return a layer with a norm before each half and one behind it."""
    return Layer(attention, ffn, norm, norm, norm, norm)


def read_llama(
    config: ConfigReader,
    norm: Norm,
    *,
    head_dim: int | None = None,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    rope: Rope | None = None,
    ropes: Sequence[Rope | None] | None = None,
    windows: Sequence[int | None] | None = None,
    bias: bool = False,
    mlp_bias: bool = False,
    ffn: FeedForward | Sequence[FeedForward] | None = None,
    layer: MakeLayer = pre_norms,
    vocab_size: int | None = None,
    positions: int | None = None,
    head: Head = UNTIED,
    embedding: Embedding = Embedding(),  # noqa: B008 - frozen
    **attention: object,
) -> DecoderSpec:
    """Read a model of Llama's shape, as its config spells it but for what is given.

    `rope` is read with the defaults `theta` and `partial` and rotates pairs if `interleaved`; `ropes` and `windows` are
    those of each layer, where they differ. `ffn`: of all layers or of each, by default the gated one. `bias`: of all
    four projections. `layer` puts a layer's halves together, `attention` are fields of its mixer that no key says.
    """
    head_dim = read_head_dim(config) if head_dim is None else head_dim
    if rope is None:
        rope = read_rope(config, head_dim, default_theta=theta, default_partial=partial)
        rope = replace(rope, interleaved=interleaved)
    mixer = read_attention(config, head_dim, rope, bias=bias, **attention)
    count = config.integer("num_hidden_layers", high=MAX_LAYERS)
    ffn = read_gated_mlp(config, bias=mlp_bias) if ffn is None else ffn
    ffns = ffn if isinstance(ffn, Sequence) else [ffn] * count
    ropes, windows = ropes or [rope] * count, windows or [mixer.window] * count
    mixers = [replace(mixer, rope=rope, window=window) for rope, window in zip(ropes, windows, strict=True)]
    layers = [layer(mixer, ffn, norm) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return decoder(config, layers, norm, vocab_size=vocab_size, positions=positions, head=head, embedding=embedding)


def rms_norm(config: ConfigReader, eps: float = 1e-6, *, unit_offset: bool = False) -> RmsNorm:
    """Read the norm of most configs; `eps`: what one means that does not say."""
    return RmsNorm(config.number("rms_norm_eps", eps, low=0.0), unit_offset)


def head_size(hidden_size: int, num_heads: int) -> int:
    """Compute the head size of a config without `head_dim`. Raises ConfigError where the heads do not fit evenly."""
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: the hidden size ({hidden_size}) is not a multiple of the number of heads ({num_heads})"
        )
    return hidden_size // num_heads


def even_head_dim(config: ConfigReader) -> int:
    """Compute the size of a head in a config that never says it: the hidden size shared out evenly."""
    return head_size(config.integer("hidden_size"), config.integer("num_attention_heads"))


def read_head_dim(config: ConfigReader, key: str = "head_dim", default: int | None = None) -> int:
    """Read the size of a head: `key`, by default `default`; where that is null or 0, the hidden size shared out."""
    return config.optional_integer(key, default, high=1024) or even_head_dim(config)


def read_attention(
    config: ConfigReader, head_dim: int, rope: Rope | None, *, bias: bool = False, **changes: object
) -> GroupedQueryAttention:
    """Read attention as most configs spell it; `bias`: of all four projections; `changes` are fields that differ."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    attention = GroupedQueryAttention(heads, kv_heads, head_dim, head_dim**-0.5, rope, qkv_bias=bias, out_bias=bias)
    return replace(attention, **changes)


def multi_head(config: ConfigReader, **changes: object) -> GroupedQueryAttention:
    """Read attention without positions whose heads, each with a key of its own, share the hidden size out evenly."""
    heads, size = config.integer("num_attention_heads"), even_head_dim(config)
    return replace(GroupedQueryAttention(heads, heads, size, size**-0.5), **changes)


def read_gated_mlp(config: ConfigReader, *, bias: bool = False) -> GatedMlp:
    """Read the gated feed-forward as most configs spell it; `bias`: of its three matrices."""
    return GatedMlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "silu"), bias)


def read_mlp(config: ConfigReader, activation: str) -> Mlp:
    """Read a feed-forward without a gate whose biases `mlp_bias` switches; `activation` is the default."""
    size = config.integer("intermediate_size")
    return Mlp(size, config.choice("hidden_act", ACTIVATIONS, activation), config.flag("mlp_bias", False))


def read_moe(
    config: ConfigReader,
    *,
    num_experts: int,
    size: int,
    top_k: int,
    normalize: bool = False,
    shared_size: int | None = None,
    count_key: str = "num_experts",
    size_key: str = "moe_intermediate_size",
) -> MixtureOfExperts:
    """Return the experts of a config that spells them as Qwen's do; the numbers are what one means that does not say.

    With `shared_size` there is one more that all tokens share, behind a gate. `count_key`, `size_key`: the keys of the
    number of experts and of an expert's size.
    """
    activation, top_k = config.choice("hidden_act", ACTIVATIONS, "silu"), config.integer("num_experts_per_tok", top_k)
    experts = MixtureOfExperts(
        num_experts=config.integer(count_key, num_experts, high=MAX_EXPERTS),
        size=config.integer(size_key, size),
        activation=activation,
        routing=Routing(top_k, normalize=config.flag("norm_topk_prob", normalize)),
    )
    if shared_size is None:
        return experts
    shared = GatedMlp(config.integer("shared_expert_intermediate_size", shared_size), activation)
    return replace(experts, shared=shared, shared_gate=True)


def predictor_renames(spec: DecoderSpec, layer: Renames, at: str, modules: Mapping[str, str]) -> Renames:
    """Return the renames of a predictor, which a checkpoint has at `at`: those of any `layer`, and its own `modules`.

    The program's weights are named as those of one layer more than the model has.
    """
    predictor, to = spec.predictor, f"layers.{len(spec.layers)}"
    if predictor is None:
        return []
    has_experts = isinstance(predictor.layer.feed_forward, MixtureOfExperts)
    own = [rename for rename in layer if "{i}" in rename.source and (has_experts or not rename.experts)]
    moved = [
        replace(
            rename,
            source=rename.source.replace("model.layers.{i}", at),
            targets=tuple(target.replace("layers.{i}", to) for target in rename.targets),
        )
        for rename in own
    ]
    return [*moved, *module_renames({source: f"{to}.{target}" for source, target in modules.items()})]


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the ALiBi slopes (arXiv 2108.12409): 2^(-8 i / n), i = 1..n, where the number of heads n is a power of 2.

    Otherwise those of the next lower power, and every other one of the next higher power's until there are enough.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    slopes += [2.0 ** (-8 * i / (2 * lower)) for i in range(1, 2 * lower, 2)]
    return tuple(slopes[:num_heads])


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


def read_sparse(config: ConfigReader, experts: MixtureOfExperts, *, dense_size: int) -> Sequence[FeedForward]:
    """Read each layer's feed-forward: every `decoder_sparse_step`-th has experts, but for those of `mlp_only_layers`.

    `dense_size`: that of a dense one in a config that does not say.
    """
    dense = GatedMlp(config.integer("intermediate_size", dense_size), config.choice("hidden_act", ACTIVATIONS, "silu"))
    step, without = config.integer("decoder_sparse_step", 1), set(config.integers("mlp_only_layers"))
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return [experts if index not in without and (index + 1) % step == 0 else dense for index in range(num_layers)]


def module_renames(names: Mapping[str, str | Sequence[str]], *, groups: int = 1) -> Renames:
    """Return renames of modules' weights and biases, each of which becomes one of the program's or is cut into several.

    What a module does not have is named too. `groups`: as in Rename.
    """
    return [
        Rename(f"{source}.{part}", tuple(f"{to}.{part}" for to in targets), groups=groups)
        for source, named in names.items()
        for targets in [(named,) if isinstance(named, str) else named]
        for part in ("weight", "bias")
    ]


def layer_renames(
    names: Mapping[str, str | Sequence[str]], at: str = "model.layers.{i}", *, groups: int = 1
) -> Renames:
    """Return renames as module_renames does, of modules in every layer; `at` is where a checkpoint has the layer."""
    targets = {source: [named] if isinstance(named, str) else named for source, named in names.items()}
    return module_renames({f"{at}.{x}": [f"layers.{{i}}.{to}" for to in y] for x, y in targets.items()}, groups=groups)


def fused_renames(
    spec: DecoderSpec, outside: Mapping[str, str], at: str, layer: Mapping[str, str], qkv: str
) -> Renames:
    """Return the renames of modules `outside` the layers and of each `layer` at `at`, also for weights and biases.

    `qkv` is the layer's module of queries, keys and values, stored group by group of the queries that share a key.
    """
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, GroupedQueryAttention)
    fused = layer_renames({qkv: ["attn.q", "attn.k", "attn.v"]}, at, groups=mixer.num_kv_heads)
    return [*module_renames(outside), *layer_renames(layer, at), *fused]


def llama_renames(*instead: Rename) -> Renames:
    """Return the renames of the Llama layout; one in `instead` replaces Llama's for the same program weight."""
    replaced = {target for rename in instead for target in rename.targets}
    layer = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{letter}_proj": f"attn.{letter}" for letter in "qkvo"},
        **{f"self_attn.{letter}_norm": f"attn.{letter}_norm" for letter in "qk"},
        **{f"mlp.{matrix}_proj": f"ffn.{matrix}" for matrix in ("gate", "up", "down")},
    }
    names = {"model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "head"}
    usual = [*module_renames(names), *layer_renames(layer)]
    return [*(rename for rename in usual if rename.targets[0] not in replaced), *instead]


def expert_renames(
    block: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    shared: str = "shared_expert",
) -> Renames:
    """Return the usual renames of a mixture of experts, each matrix of each expert in a tensor of its own; as MLX has
    them, those of all experts.

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
        names.append(Rename(f"{prefix}.switch_mlp.{matrix}_proj.weight", (f"{to}.{matrix}.weight",), experts=True))
        names.append(Rename(f"{prefix}.{shared}.{stored}.weight", (f"{to}.shared.{matrix}.weight",)))
    return names
