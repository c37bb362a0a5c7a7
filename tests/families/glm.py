from tiny_parts import Choose, tiny_attention, tiny_partial_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "glm",
        **attention,
        "attention_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_partial_rope(choose, head_dim),
    }
