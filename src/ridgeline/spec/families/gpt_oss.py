"""gpt-oss: experts with a clamped SwiGLU and biases, attention sinks, a window in every other layer, YaRN."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import MAX_EXPERTS, head_size, llama_renames, read_attention, read_rope, read_windows
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import ClampedSwiGlu, DecoderSpec, Head, Layer, MixtureOfExperts, Rename, RmsNorm, Routing
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.optional_integer("head_dim", 64, high=1024) or head_size(hidden, heads)
    # Other spellings of num_experts_per_tok and of the rope's original context, which the published files carry too.
    config.ignore("experts_per_token", "initial_context_length")
    config.expect("hidden_act", "silu")
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        raise ConfigError("config.json: rope_parameters or rope_scaling is missing; gpt_oss needs to know its YaRN")
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    bias = config.flag("attention_bias", True)
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_theta=150000.0), bias=bias),
        sinks=True,
    )
    experts = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", high=MAX_EXPERTS),
        size=config.integer("intermediate_size"),
        activation=ClampedSwiGlu(
            limit=config.number("swiglu_limit", 7.0, low=1e-3),
            alpha=config.number("swiglu_alpha", 1.702, low=1e-3),
        ),
        routing=Routing(config.integer("num_experts_per_tok", 4), router_bias=True),
        bias=True,
    )
    windows = read_windows(config, config.optional_integer("sliding_window", 128), lambda index: index % 2 == 0)
    return DecoderSpec(
        model_type="gpt_oss",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 131072),
        layers=tuple(Layer(replace(attention, window=window), experts, norm, norm) for window in windows),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    """Plain tensors hold all experts [E, in, out], gate and up in turn; MXFP4 has the same turn in [E, out, in]."""
    at, to = "model.layers.{i}", "layers.{i}"
    layout = [Rename(f"{at}.self_attn.sinks", (f"{to}.attn.sinks",))]
    layout += [Rename(f"{at}.mlp.router.{part}", (f"{to}.ffn.router.{part}",)) for part in ("weight", "bias")]
    experts = next(layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MixtureOfExperts))
    for stored, matrices, groups in (("gate_up_proj", ("gate", "up"), experts.size), ("down_proj", ("down",), 1)):
        source = f"{at}.mlp.experts.{stored}"
        weights, biases = (tuple(f"{to}.ffn.{x}.{part}" for x in matrices) for part in ("weight", "bias"))
        layout += [
            Rename(source, weights, transpose=True, experts=True, groups=groups),
            Rename(f"{source}_blocks", weights, experts=True, groups=groups),
            Rename(f"{source}_bias", biases, experts=True, groups=groups),
        ]
    return [*llama_renames(), *layout]


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    num_experts = choose(1, 3, 8)
    rope = tiny_rope(choose, head_dim)
    if not (rope.get("rope_parameters") or rope.get("rope_scaling")):
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    return {
        "model_type": "gpt_oss",
        "hidden_size": choose(24, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": choose(False, True),
        "sliding_window": choose(1, 4, 64),
        "num_local_experts": num_experts,
        "num_experts_per_tok": choose(1, min(2, num_experts), num_experts),
        "swiglu_limit": choose(0.5, 7.0),
        "swiglu_alpha": choose(1.0, 1.702),
        **tiny_sizes(choose),
        **rope,
    }
