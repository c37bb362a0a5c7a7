from tiny_parts import Choose, tiny_heads, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    alpha: dict[str, object] = {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    }
    return {
        "model_type": "hunyuan_v1_dense",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": choose("silu", "gelu_pytorch_tanh"),
        "attention_bias": choose(False, True),
        **tiny_sizes(choose),
        **choose(alpha, tiny_rope(choose, head_dim)),
    }
