from tiny_parts import Choose, tiny_attention, tiny_layer_types, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    sizes = tiny_sizes(choose)
    sizes["layer_norm_eps"] = sizes.pop("rms_norm_eps")
    return {
        "model_type": "cohere2",
        **attention,
        "attention_bias": choose(False, True),
        "logit_scale": choose(0.0625, 0.8, 1.0),
        "sliding_window": choose(1, 4, 16, 64),
        **choose({"layer_types": tiny_layer_types(choose, sizes)}, {"sliding_window_pattern": choose(2, 4)}),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
