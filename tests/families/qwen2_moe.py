from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes, tiny_sparse_layers, tiny_windows


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    num_experts = choose(2, 5, 16)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "qwen2_moe",
        **attention,
        "qkv_bias": choose(False, True),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, 2, min(8, num_experts)),
        "moe_intermediate_size": choose(12, 40),
        "shared_expert_intermediate_size": choose(20, 56),
        "norm_topk_prob": choose(False, True),
        **tiny_sparse_layers(choose, sizes),
        **sizes,
        **tiny_rope(choose, head_dim),
        **tiny_windows(choose, sizes),
    }
