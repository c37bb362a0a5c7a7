from tiny_parts import Choose, tiny_heads, tiny_rope, tiny_sizes, tiny_windows


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "qwen3",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": choose(False, True),
        **sizes,
        **tiny_rope(choose, head_dim),
        **tiny_windows(choose, sizes),
    }
