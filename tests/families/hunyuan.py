from tiny_parts import Choose, tiny_heads, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    num_experts = choose(1, 1, 4, 5)
    return {
        "model_type": "hunyuan",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "attention_head_dim": head_dim,
        "attention_bias": choose(False, True),
        "mlp_bias": num_experts == 1 and choose(False, True),
        "num_experts": num_experts,
        "moe_topk": choose(1, min(2, num_experts)),
        "moe_layer_num_skipped": choose(0, 1),
        "moe_intermediate_size": choose(12, 40),
        "num_shared_expert": choose(1, 2),
        "use_mixed_mlp_moe": choose(True, True, False),
        "use_qk_norm": choose(True, True, False),
        "use_cla": choose(True, True, False),
        "cla_share_factor": choose(2, 3),
        "rope_theta": 10000.0,
        "rope_scaling": choose(None, {"type": "dynamic", "alpha": choose(8.0, 1000.0), "factor": 1.0}),
        **tiny_sizes(choose),
    }
