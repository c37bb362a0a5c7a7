"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention; experts by softmax, some in the best groups only."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, MAX_EXPERTS, MAX_LAYERS, expert_renames, llama_renames
from ridgeline.spec.common_latent import latent_renames, read_latent_attention
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Head, Layer, MixtureOfExperts, Rename, RmsNorm, Routing
from ridgeline.spec.tiny import Choose, tiny_rope, tiny_sizes


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
    return read_deepseek(config, "deepseek_v2", routing, interleaved=True)


def read_deepseek(config: ConfigReader, model_type: str, routing: Routing, *, interleaved: bool) -> DecoderSpec:
    """A DeepSeek model: latent attention, and experts beside shared ones behind the first few dense layers."""
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    expert_size = config.integer("moe_intermediate_size", 1407)
    dense = GatedMlp(config.integer("intermediate_size"), activation)
    experts = MixtureOfExperts(
        num_experts=config.integer("n_routed_experts", 64, high=MAX_EXPERTS),
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
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return DecoderSpec(
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=tuple(Layer(attention, dense if i < num_dense else experts, norm, norm) for i in range(num_layers)),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*llama_renames(*latent_renames(spec)), *expert_renames(shared="shared_experts")]


def tiny(choose: Choose) -> dict[str, object]:
    return {
        "model_type": "deepseek_v2",
        "topk_method": choose("greedy", "group_limited_greedy"),
        **tiny_deepseek(choose),
    }


def tiny_deepseek(choose: Choose) -> dict[str, object]:
    """What the tiny configs of DeepSeek's models have in common; 12 or 24 experts in 1, 2, 3 or 4 groups."""
    heads, rope_dim = choose(1, 2, 3, 8), choose(4, 8, 16)
    sizes = tiny_sizes(choose)
    return {
        "hidden_size": choose(48, 96),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": choose(None, 24, 33),
        "kv_lora_rank": choose(16, 34, 64),
        "qk_nope_head_dim": choose(8, 20, 32),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": choose(8, 12, 32),
        "attention_bias": choose(False, True),
        "n_routed_experts": choose(12, 24),
        "n_shared_experts": choose(1, 2),
        "num_experts_per_tok": choose(1, 2, 3),
        "moe_intermediate_size": choose(12, 20),
        "first_k_dense_replace": choose(0, 1),
        "n_group": choose(1, 2, 3, 4),
        "topk_group": 1,
        "routed_scaling_factor": choose(1.0, 2.5),
        **sizes,
        **tiny_rope(choose, rope_dim),
    }
