from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    return {
        "model_type": "olmo2",
        **attention,
        "attention_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
