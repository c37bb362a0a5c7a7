from tiny_parts import Choose, tiny_heads, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    num_experts = choose(1, 3, 8)
    rope = tiny_rope(choose, head_dim)
    if not (rope.get("rope_parameters") or rope.get("rope_scaling")):
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    return {
        "model_type": "gpt_oss",
        "hidden_size": choose(24, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": choose(False, True),
        "sliding_window": choose(1, 4, 64),
        "num_local_experts": num_experts,
        "num_experts_per_tok": choose(1, min(2, num_experts), num_experts),
        "swiglu_limit": choose(0.5, 7.0),
        "swiglu_alpha": choose(1.0, 1.702),
        **tiny_sizes(choose),
        **rope,
    }
