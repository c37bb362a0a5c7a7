from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes, tiny_windows


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "qwen2",
        **attention,
        **sizes,
        **tiny_rope(choose, head_dim),
        **tiny_windows(choose, sizes),
    }
