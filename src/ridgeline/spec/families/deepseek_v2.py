"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention; experts by softmax, some in the best groups only."""

import math
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec import common
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.parts import GatedMlp, RmsNorm, Rope, YarnRope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, LatentAttention, Layer, MixtureOfExperts, Predictor, Renames, Routing

LATENT_NORM = RmsNorm(1e-6)  # whatever rms_norm_eps says
MAX_RANK = 1 << 14


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False, None)
    groups, top_groups = config.optional_integer("n_group") or 1, config.optional_integer("topk_group") or 1
    limited = config.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    routing = Routing(
        top_k=config.integer("num_experts_per_tok"),
        normalize=False,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=groups if limited else 1,
        top_groups=top_groups if limited else 1,
    )
    return read_deepseek(config, routing, interleaved=True)


def read_deepseek(config: ConfigReader, routing: Routing, *, interleaved: bool, num_predictors: int = 0) -> DecoderSpec:
    """Read a DeepSeek model: latent attention, and experts beside shared ones behind the first few dense layers."""
    norm = common.rms_norm(config)
    activation = config.choice("hidden_act", common.ACTIVATIONS, "silu")
    expert_size = config.integer("moe_intermediate_size", 1407)
    dense = GatedMlp(config.integer("intermediate_size"), activation)
    experts = MixtureOfExperts(
        num_experts=config.integer("n_routed_experts", 64, high=common.MAX_EXPERTS),
        size=expert_size,
        activation=activation,
        routing=routing,
        shared=GatedMlp(expert_size * config.integer("n_shared_experts", 2, high=64), activation),
    )
    config.expect("moe_layer_freq", 1)
    config.expect("mlp_bias", False)
    config.ignore("ep_size", "aux_loss_alpha", "seq_aux")  # of training and of other engines
    attention = read_latent_attention(config, interleaved=interleaved)
    num_dense = config.integer("first_k_dense_replace", 0, low=0)
    num_layers = config.integer("num_hidden_layers", high=common.MAX_LAYERS)
    layers = [Layer(attention, dense if i < num_dense else experts, norm, norm) for i in range(num_layers + 1)]
    spec = common.decoder(config, layers[:-1], norm)
    if not num_predictors:
        return spec
    return replace(spec, predictor=Predictor(layers[-1], norm, returns_normed=False, num_layers=num_predictors))


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


def renames(spec: DecoderSpec) -> Renames:
    compressed = any(isinstance(layer.mixer, LatentAttention) and layer.mixer.q_rank for layer in spec.layers)
    attention = {("q_b_proj" if compressed else "q_proj"): "q", "q_a_layernorm": "q_norm", "q_a_proj": "q_down"}
    attention |= {"kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up", "kv_a_proj_with_mqa": "kv_down"}
    latent = common.layer_renames({f"self_attn.{source}": f"attn.{to}" for source, to in attention.items()})
    return [*common.llama_renames(*latent), *common.expert_renames(shared="shared_experts")]
