"""Hunyuan-Large: groups of layers share the keys and values of one (CLA); queries and keys are normalised once rotated.

Its experts are not read yet: a config with more than one is refused.
"""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, head_size, llama_renames, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, GroupedQueryAttention, Head, Layer, Rename, RmsNorm, Rope
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_sizes

# Token ids of a multimodal sibling, which the same configuration class writes; and settings of training.
IGNORED = (
    *("eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "image_token_id", "mask_init_id", "pad_id"),
    *("text_start_id", "text_end_id", "video_start_id", "video_end_id", "org_vocab_size", "capacity_factor"),
    *("moe_topk", "num_shared_expert", "moe_intermediate_size", "moe_layer_num_skipped", "use_mixed_mlp_moe"),
    *("moe_drop_tokens", "moe_random_routing_dropped_token"),
)


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = config.optional_integer("attention_head_dim", high=1024) or head_size(hidden, heads)
    bias = config.flag("attention_bias", False)
    config.expect("num_experts", 1)
    config.expect("use_rotary_pos_emb", True)
    config.expect("norm_type", "hf_rms", "rms")
    for key in ("use_mla", "mamba", "add_classification_head", "position_embedding_xdrope"):
        config.expect(key, False)
    config.ignore(*IGNORED)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    mlp = GatedMlp(
        config.integer("intermediate_size"),
        config.choice("hidden_act", ACTIVATIONS, "silu"),
        config.flag("mlp_bias", False),
    )
    has_qk_norm = config.flag("use_qk_norm", False)
    rope = read_alpha_rope(config, head_dim)
    kv_heads = config.integer("num_key_value_heads", heads)
    share = config.integer("cla_share_factor", 1)
    share = share if config.flag("use_cla", False) else 1

    def layer(index: int) -> Layer:
        attention = GroupedQueryAttention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            qk_norm=norm if has_qk_norm else None,
            qk_norm_over="rotated head",
            qkv_bias=bias,
            out_bias=bias,
            kv_from=index - index % share if index % share else None,
        )
        return Layer(attention, mlp, norm, norm)

    return DecoderSpec(
        model_type="hunyuan",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=tuple(layer(index) for index in range(config.integer("num_hidden_layers", high=MAX_LAYERS))),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def read_alpha_rope(config: ConfigReader, head_dim: int) -> Rope:
    """As read_rope; type dynamic with `alpha` stretches the base for any length: theta * alpha^(d / (d - 2))."""
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


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    at = "layers.{i}"
    return llama_renames(
        Rename(f"model.{at}.self_attn.query_layernorm.weight", (f"{at}.attn.q_norm.weight",)),
        Rename(f"model.{at}.self_attn.key_layernorm.weight", (f"{at}.attn.k_norm.weight",)),
    )


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    return {
        "model_type": "hunyuan",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "attention_head_dim": head_dim,
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        "use_qk_norm": choose(True, True, False),
        "use_cla": choose(True, True, False),
        "cla_share_factor": choose(2, 3),
        "rope_theta": 10000.0,
        "rope_scaling": choose(None, {"type": "dynamic", "alpha": choose(8.0, 1000.0), "factor": 1.0}),
        **tiny_sizes(choose),
    }
