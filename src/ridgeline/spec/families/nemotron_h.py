"""Nemotron-H: every layer is one of Mamba-2, attention without positions, or a feed-forward (arXiv 2504.03624)."""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, decoder, layer_renames, read_mlp
from ridgeline.spec.common_recurrent import NOT_COMPUTED, backbone_renames, mamba2_renames
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GroupedQueryAttention, Layer, Mamba2, Renames, RmsNorm

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
KINDS = {"mamba": "linear_attention", "attention": "full_attention"} | {kind: kind for kind in LETTERS.values()}
# For mixtures of experts and layers that guess further tokens: of no bearing on models that have none of them.
UNUSED = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob"),
    *("n_group", "topk_group", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    *("moe_shared_expert_overlap", "output_router_logits", "num_nextn_predict_layers", "mtp_layers_block_type"),
    *("mtp_hybrid_override_pattern", "num_logits_to_keep", "mamba_ssm_cache_dtype", "expand", "attention_bias"),
    *("time_step_limit", "mamba_proj_bias"),  # not read by the model either
)


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore(*NOT_COMPUTED, *UNUSED)
    config.spell(hidden_act="mlp_hidden_act")
    config.expect("sliding_window", None)
    config.expect("tie_word_embeddings", False)
    norm = RmsNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))
    layer_of = {
        "linear_attention": Layer(_mamba(config, norm), None, mixer_norm=norm),
        "full_attention": Layer(_attention(config), None, mixer_norm=norm),
        "mlp": Layer(None, read_mlp(config, "relu2"), ffn_norm=norm),
    }
    return decoder(config, [layer_of[kind] for kind in _kinds(config)], norm, positions=4096)


def _kinds(config: ConfigReader) -> Sequence[str]:
    """Read what each layer is, in either spelling."""
    if config.has("layers_block_type"):
        config.ignore("hybrid_override_pattern")
        names = [KINDS.get(name, name) for name in config.texts("layers_block_type")]
    else:
        names = [LETTERS.get(letter, letter) for letter in config.text("hybrid_override_pattern")]
    count = config.integer("num_hidden_layers", len(names), high=MAX_LAYERS)
    unknown = sorted(set(names) - {"linear_attention", "full_attention", "mlp"})
    if unknown or count != len(names):
        raise ConfigError(
            f"config.json: the layers of nemotron_h are Mamba (M), attention (*) or mlp (-), {count} of them; found "
            f"{len(names)}" + (f" and {', '.join(map(repr, unknown))}" if unknown else "")
        )
    return names


def _mamba(config: ConfigReader, norm: RmsNorm) -> Mamba2:
    return Mamba2(
        num_heads=config.integer("mamba_num_heads", 128),
        head_dim=config.integer("mamba_head_dim", 64, high=1024),
        num_groups=config.integer("n_groups", 8),
        state_size=config.integer("ssm_state_size", 128),
        conv_taps=config.integer("conv_kernel", 4, high=64),
        activation=config.choice("mamba_hidden_act", ACTIVATIONS, "silu"),
        norm_eps=norm.eps,
        dt_limits=(config.number("time_step_min", 0.001, low=0.0), float("inf")),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
    )


def _attention(config: ConfigReader) -> GroupedQueryAttention:
    heads, head_dim = config.integer("num_attention_heads", 32), config.integer("head_dim", 128, high=1024)
    kv_heads = config.optional_integer("num_key_value_heads", 8) or heads
    return GroupedQueryAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


def renames(spec: DecoderSpec) -> Renames:
    """Return the renames: a layer has one norm and one mixer, whose program weights depend on what the layer is."""
    names = {"norm": "ffn_norm", "mixer.up_proj": "ffn.up", "mixer.down_proj": "ffn.down"}
    names |= {f"mixer.{letter}_proj": f"attn.{letter}" for letter in "qkvo"}
    layers = "backbone.layers.{i}"
    return [*backbone_renames(), *layer_renames(names, layers), *mamba2_renames(f"{layers}.mixer")]
