from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "mistral",
        **attention,
        "sliding_window": choose(None, 1, 4, 16, 64),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
