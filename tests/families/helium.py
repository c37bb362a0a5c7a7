from tiny_parts import Choose, tiny_heads, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    return {
        "model_type": "helium",
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": choose("silu", "gelu_pytorch_tanh"),
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
