"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention; experts by softmax, some in the best groups only."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, MAX_EXPERTS, MAX_LAYERS, decoder, expert_renames, llama_renames, rms_norm
from ridgeline.spec.common_latent import latent_renames, read_latent_attention
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Layer, MixtureOfExperts, Rename, Routing


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


def read_deepseek(config: ConfigReader, routing: Routing, *, interleaved: bool) -> DecoderSpec:
    """Read a DeepSeek model: latent attention, and experts beside shared ones behind the first few dense layers."""
    norm = rms_norm(config)
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
    return decoder(
        config, [Layer(attention, dense if i < num_dense else experts, norm, norm) for i in range(num_layers)], norm
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*llama_renames(*latent_renames(spec)), *expert_renames(shared="shared_experts")]
