from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "arcee",
        **attention,
        "hidden_act": choose("relu2", "gelu_pytorch_tanh"),
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
