"""gpt-oss: experts with a clamped SwiGLU and biases, attention sinks, a window in every other layer, YaRN."""

import itertools

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import MAX_EXPERTS, llama_renames, read_head_dim, read_llama, read_windows, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import ClampedSwiGlu, DecoderSpec, MixtureOfExperts, Rename, Renames, Routing


def read(config: ConfigReader) -> DecoderSpec:
    # Other spellings of num_experts_per_tok and of the rope's original context, which the published files carry too.
    config.ignore("experts_per_token", "initial_context_length")
    config.expect("hidden_act", "silu")
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        raise ConfigError("config.json: rope_parameters or rope_scaling is missing; gpt_oss needs to know its YaRN")
    experts = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", high=MAX_EXPERTS),
        size=config.integer("intermediate_size"),
        activation=ClampedSwiGlu(
            limit=config.number("swiglu_limit", 7.0, low=1e-3), alpha=config.number("swiglu_alpha", 1.702, low=1e-3)
        ),
        routing=Routing(config.integer("num_experts_per_tok", 4), router_bias=True),
        bias=True,
    )
    windows = read_windows(config, config.optional_integer("sliding_window", 128), lambda index: index % 2 == 0)
    return read_llama(
        config,
        rms_norm(config, 1e-5),
        head_dim=read_head_dim(config, default=64),
        theta=150000.0,
        windows=windows,
        bias=config.flag("attention_bias", True),
        sinks=True,
        ffn=experts,
        positions=131072,
    )


def renames(spec: DecoderSpec) -> Renames:
    """Return the renames: plain tensors hold experts [E, in, out], MXFP4 [E, out, in], both gate and up in
    turn; MLX has three of those.
    """
    prefix, to = "model.layers.{i}", "layers.{i}"
    layout = [Rename(f"{prefix}.self_attn.sinks", (f"{to}.attn.sinks",))]
    layout += [Rename(f"{prefix}.mlp.router.{part}", (f"{to}.ffn.router.{part}",)) for part in ("weight", "bias")]
    experts = next(layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MixtureOfExperts))
    for stored, matrices, groups in (("gate_up_proj", ("gate", "up"), experts.size), ("down_proj", ("down",), 1)):
        source = f"{prefix}.mlp.experts.{stored}"
        weights, biases = (tuple(f"{to}.ffn.{x}.{part}" for x in matrices) for part in ("weight", "bias"))
        layout += [
            Rename(source, weights, transpose=True, experts=True, groups=groups),
            Rename(f"{source}_blocks", weights, experts=True, groups=groups),
            Rename(f"{source}_bias", biases, experts=True, groups=groups),
        ]
    for part, matrix in itertools.product(("weight", "bias"), ("gate", "up", "down")):
        source = f"{prefix}.mlp.experts.{matrix}_proj.{part}"
        layout.append(Rename(source, (f"{to}.ffn.{matrix}.{part}",), experts=True))
    return [*llama_renames(), *layout]
