from tiny_parts import Choose, tiny_attention, tiny_layer_types, tiny_local_global_ropes, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "olmo3",
        **attention,
        "attention_bias": choose(False, True),
        "sliding_window": choose(1, 4, 16, 64),
        "layer_types": tiny_layer_types(choose, sizes),
        **sizes,
        **tiny_local_global_ropes(choose, head_dim),
    }
