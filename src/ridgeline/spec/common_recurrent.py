"""Families with recurrent layers share this: Mamba's sizes, which layers attend, tensor names."""

from collections.abc import Callable, Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, decoder, layer_renames, module_renames
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Mamba, Mamba2, Norm, Rename, Renames, RmsNorm

UNBOUNDED_POSITIONS = 1 << 20  # of a model that declares no limit, because it keeps nothing of every token

# How weights are initialised, how a kernel cuts the sequence, what a cache of another library looks like.
NOT_COMPUTED = (
    *("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor"),
    *("rescale_prenorm_residual", "use_mambapy", "use_falcon_mambapy", "use_associative_scan", "chunk_size"),
    *("residual_in_fp32", "use_mamba_kernels", "fused_add_norm", "rms_norm", "ssm_cfg", "d_inner", "d_model"),
)


def read_pure_mamba(config: ConfigReader, mixer: Mamba | Mamba2, tied: bool) -> DecoderSpec:
    """Read a stack of nothing but `mixer`, each after a norm; `tied` is the default of tie_word_embeddings."""
    norm = read_norm(config)
    config.ignore(*NOT_COMPUTED)
    return decoder(config, Layer(mixer, None, norm), norm, positions=UNBOUNDED_POSITIONS, head=Head(tied))


def read_norm(config: ConfigReader) -> RmsNorm:
    """Read the norm before every mixer."""
    return RmsNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))


def read_mamba(config: ConfigReader, inner_norm: Norm | None = None) -> Mamba:
    """Read the mixer of a config that spells its sizes as Mamba's does."""
    hidden = config.integer("hidden_size")
    inner = hidden * config.integer("expand", 2, high=64)
    return Mamba(
        inner_size=config.integer("intermediate_size", inner, low=inner, high=inner),
        state_size=config.integer("state_size", 16),
        dt_rank=config.integer_or_auto("time_step_rank", -(-hidden // 16)),
        conv_taps=config.integer("conv_kernel", 4, high=64),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
        inner_norm=inner_norm,
    )


def check_inner(inner: int, heads: int, size: int) -> None:
    """Raise ConfigError where `heads` of this size are not exactly the inner channels."""
    if heads * size != inner:
        raise ConfigError(f"config.json: {heads} Mamba heads of {size} channels are not the {inner} inner channels")


def read_attending(config: ConfigReader, by_default: Callable[[int], bool]) -> Sequence[bool]:
    """Read which layers attend: those that `layer_types` calls full_attention, without it those that `by_default` says.

    Raises ConfigError where the list has the wrong length or names another kind of layer.
    """
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    config.ignore("layer_types")  # null
    if not config.has("layer_types"):
        return [by_default(index) for index in range(num_layers)]
    types = config.texts("layer_types")
    if len(types) != num_layers or not set(types) <= {"full_attention", "linear_attention"}:
        raise ConfigError(
            f"config.json: layer_types must name full_attention or linear_attention for each of {num_layers} layers"
        )
    return [kind == "full_attention" for kind in types]


def mamba_renames(source: str) -> Renames:
    """Return the renames of a Mamba mixer under `source`."""
    target = "layers.{i}.mamba"
    names = {"in_proj": ["mamba.x", "mamba.z"], "x_proj": ["mamba.dt_low", "mamba.b", "mamba.c"]}
    names |= {"dt_proj": ["mamba.dt"], "out_proj": ["mamba.out"]}
    names |= {f"{x}_layernorm": [f"mamba.{to}_norm"] for x, to in (("dt", "dt_low"), ("b", "b"), ("c", "c"))}
    return [
        *layer_renames(names, source),
        Rename(f"{source}.conv1d.weight", (f"{target}.conv.weight",), depthwise=True),
        Rename(f"{source}.conv1d.bias", (f"{target}.conv.bias",)),
        Rename(f"{source}.A_log", (f"{target}.A_log",)),
        Rename(f"{source}.D", (f"{target}.D",)),
    ]


def mamba2_renames(source: str) -> Renames:
    """Return the renames of a Mamba-2 mixer under `source`."""
    target = "layers.{i}.mamba"
    fused = [f"mamba.{name}" for name in ("z", "x", "b", "c", "dt")]
    names = {"in_proj": fused, "norm": ["mamba.norm"], "out_proj": ["mamba.out"]}
    convs = {part: tuple(f"{target}.conv_{name}.{part}" for name in "xbc") for part in ("weight", "bias")}
    return [
        *layer_renames(names, source),
        *(Rename(f"{source}.conv1d.{part}", to, depthwise=part == "weight") for part, to in convs.items()),
        *(Rename(f"{source}.{name}", (f"{target}.{name}",)) for name in ("A_log", "D", "dt_bias")),
    ]


def backbone_renames() -> Renames:
    """Return the renames of what is beside the mixers in a model whose tensors stand under `backbone`."""
    outside = {"backbone.embeddings": "embed", "backbone.norm_f": "final_norm", "lm_head": "head"}
    return [*module_renames(outside), *layer_renames({"norm": "mixer_norm"}, "backbone.layers.{i}")]


def hybrid_renames() -> Renames:
    """Return the renames that hybrids of Mamba and attention have instead of Llama's."""
    layer = {f"feed_forward.{matrix}_proj": f"ffn.{matrix}" for matrix in ("gate", "up", "down")}
    layer["pre_ff_layernorm"] = "ffn_norm"
    return [*module_renames({"model.final_layernorm": "final_norm"}), *layer_renames(layer)]
