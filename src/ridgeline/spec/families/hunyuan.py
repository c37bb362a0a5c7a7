"""Hunyuan-Large: groups of layers share the keys and values of one (CLA); an expert that all tokens share."""

from dataclasses import replace

from ridgeline.spec import common
from ridgeline.spec.common_rope import read_alpha_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Layer, MixtureOfExperts, Renames, Routing

# Token ids of a multimodal sibling, which the same configuration class writes; and settings of training.
IGNORED = (
    *("eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "image_token_id", "mask_init_id", "pad_id"),
    *("text_start_id", "text_end_id", "video_start_id", "video_end_id", "org_vocab_size", "capacity_factor"),
    *("moe_drop_tokens", "moe_random_routing_dropped_token"),
)


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = common.read_head_dim(config, "attention_head_dim")
    bias = config.flag("attention_bias", False)
    config.expect("use_rotary_pos_emb", True)
    config.expect("norm_type", "hf_rms", "rms")
    for key in ("use_mla", "mamba", "add_classification_head", "position_embedding_xdrope"):
        config.expect(key, False)
    config.ignore(*IGNORED)
    norm = common.rms_norm(config, 1e-5)
    dense, experts = _read_feed_forwards(config)
    num_dense = config.integer("moe_layer_num_skipped", 0, low=0)
    rope, qk_norm = read_alpha_rope(config, head_dim), norm if config.flag("use_qk_norm", False) else None
    attention = common.read_attention(config, head_dim, rope, bias=bias, qk_norm=qk_norm, qk_norm_over="rotated head")
    share = config.integer("cla_share_factor", 1)
    share = share if config.flag("use_cla", False) else 1

    def layer(index: int) -> Layer:
        mixer = replace(attention, kv_from=index - index % share if index % share else None)
        return Layer(mixer, dense if experts is None or index < num_dense else experts, norm, norm)

    layers = [layer(index) for index in range(config.integer("num_hidden_layers", high=common.MAX_LAYERS))]
    return common.decoder(config, layers, norm, positions=2048)


def _read_feed_forwards(config: ConfigReader) -> tuple[GatedMlp, MixtureOfExperts | None]:
    """Read the feed-forward of dense layers, and that of layers with experts if there are any."""
    size, activation = config.integer("intermediate_size"), config.choice("hidden_act", common.ACTIVATIONS, "silu")
    bias = config.flag("mlp_bias", False)
    num_experts, top_k = config.integer("num_experts", 1, high=common.MAX_EXPERTS), config.integer("moe_topk", 1)
    num_shared, expert_size = config.integer("num_shared_expert", 1), config.integer("moe_intermediate_size", size)
    is_mixed = config.flag("use_mixed_mlp_moe", False)
    if num_experts == 1:
        return GatedMlp(size, activation, bias), None
    config.expect("mlp_bias", False)
    experts = MixtureOfExperts(
        num_experts=num_experts,
        size=expert_size,
        activation=activation,
        routing=Routing(top_k, normalize=top_k > 1),
        shared=GatedMlp(size * num_shared, activation) if is_mixed else None,
    )
    return GatedMlp(size, activation, bias), experts


def renames(spec: DecoderSpec) -> Renames:
    names = {f"self_attn.{word}_layernorm": f"attn.{word[0]}_norm" for word in ("query", "key")}
    names["mlp.gate.wg"] = "ffn.router"
    return [*common.llama_renames(*common.layer_renames(names)), *common.expert_renames(shared="shared_mlp")]
