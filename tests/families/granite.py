from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    return {
        "model_type": "granite",
        **attention,
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        "embedding_multiplier": choose(1.0, 12.0),
        "attention_multiplier": choose(0.0625, 0.2),
        "residual_multiplier": choose(1.0, 0.22),
        "logits_scaling": choose(1.0, 6.0),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
