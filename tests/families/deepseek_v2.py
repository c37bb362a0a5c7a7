from tiny_parts import Choose, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    return {
        "model_type": "deepseek_v2",
        "topk_method": choose("greedy", "group_limited_greedy"),
        **tiny_deepseek(choose),
    }


def tiny_deepseek(choose: Choose) -> dict[str, object]:
    """What the tiny configs of DeepSeek's models have in common; 12 or 24 experts in 1, 2, 3 or 4 groups."""
    heads, rope_dim = choose(1, 2, 3, 8), choose(4, 8, 16)
    sizes = tiny_sizes(choose)
    return {
        "hidden_size": choose(48, 96),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": choose(None, 24, 33),
        "kv_lora_rank": choose(16, 34, 64),
        "qk_nope_head_dim": choose(8, 20, 32),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": choose(8, 12, 32),
        "attention_bias": choose(False, True),
        "n_routed_experts": choose(12, 24),
        "n_shared_experts": choose(1, 2),
        "num_experts_per_tok": choose(1, 2, 3),
        "moe_intermediate_size": choose(12, 20),
        "first_k_dense_replace": choose(0, 1),
        "n_group": choose(1, 2, 3, 4),
        "topk_group": 1,
        "routed_scaling_factor": choose(1.0, 2.5),
        **sizes,
        **tiny_rope(choose, rope_dim),
    }
