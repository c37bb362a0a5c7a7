from tiny_parts import Choose, tiny_attention, tiny_by_layer, tiny_layer_types, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "smollm3",
        **attention,
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        "no_rope_layers": choose(None, tiny_by_layer(choose, sizes, 0, 1)),
        "no_rope_layer_interval": choose(2, 4),
        "use_sliding_window": choose(False, True),
        "sliding_window": choose(1, 4, 16, 64),
        "layer_types": choose(None, tiny_layer_types(choose, sizes)),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
