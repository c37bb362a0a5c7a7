from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "ernie4_5",
        **attention,
        "hidden_act": choose("silu", "gelu_pytorch_tanh"),
        "use_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
