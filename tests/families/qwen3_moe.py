from tiny_parts import Choose, tiny_heads, tiny_rope, tiny_sizes, tiny_sparse_layers


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    num_experts = choose(2, 5, 16)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "qwen3_moe",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": choose(False, True),
        "use_sliding_window": choose(False, False, True),
        "sliding_window": choose(4, 64),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, 2, min(8, num_experts)),
        "moe_intermediate_size": choose(12, 40),
        "norm_topk_prob": choose(False, True),
        **tiny_sparse_layers(choose, sizes),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
