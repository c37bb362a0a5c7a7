from tiny_parts import Choose, tiny_by_layer, tiny_heads, tiny_sizes, tiny_sparse_layers


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, _ = tiny_heads(choose)
    sizes = tiny_sizes(choose)
    num_experts, key_heads = choose(2, 5), choose(1, 2)
    types = tiny_by_layer(choose, sizes, "linear_attention", "linear_attention", "full_attention")
    return {
        "model_type": "qwen3_next",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": choose(8, 32),  # a quarter of it is rotated
        "attention_bias": choose(False, True),
        "rope_theta": choose(10000.0, 500000.0),
        "layer_types": choose(types, None),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * choose(1, 2, 3),
        "linear_key_head_dim": choose(8, 16),
        "linear_value_head_dim": choose(8, 12),
        "linear_conv_kernel_dim": choose(2, 4),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, 2),
        "moe_intermediate_size": choose(12, 40),
        "shared_expert_intermediate_size": choose(20, 56),
        "norm_topk_prob": choose(False, True),
        **tiny_sparse_layers(choose, sizes),
        **sizes,
        "rms_norm_eps": choose(1e-4, 1e-3),  # a head that answers next to nothing is normalised: noise, in small heads
    }
