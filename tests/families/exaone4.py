from tiny_parts import Choose, tiny_attention, tiny_layer_types, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    sizes = tiny_sizes(choose)
    windows: list[dict[str, object]] = [
        {"sliding_window": None, "layer_types": ["full_attention"] * len(tiny_layer_types(choose, sizes))},
        {"sliding_window": choose(1, 4, 16, 64), "sliding_window_pattern": choose(2, 4)},
        {"sliding_window": choose(1, 4, 16, 64), "layer_types": tiny_layer_types(choose, sizes)},
    ]
    return {
        "model_type": "exaone4",
        **attention,
        **choose(*windows),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
