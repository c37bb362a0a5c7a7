from tiny_parts import Choose, tiny_attention, tiny_partial_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    sizes = tiny_sizes(choose)
    sizes["norm_eps"] = sizes.pop("rms_norm_eps")
    return {
        "model_type": "nemotron",
        **attention,
        "hidden_act": choose("relu2", "gelu"),
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        **sizes,
        **tiny_partial_rope(choose, head_dim),
    }
