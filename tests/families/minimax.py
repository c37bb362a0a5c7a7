from tiny_parts import Choose, tiny_by_layer, tiny_heads, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, _ = tiny_heads(choose)
    sizes = tiny_sizes(choose)
    types = tiny_by_layer(choose, sizes, "linear_attention", "linear_attention", "full_attention")
    factors = {
        f"{kind}_{name}_factor": choose(1, 0.5, 3.5)
        for kind in ("full_attn", "linear_attn", "mlp")
        for name in ("alpha", "beta")
    }
    return {
        "model_type": "minimax",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": choose(8, 20),
        "rope_theta": choose(10000.0, 500000.0),
        "layer_types": choose(types, None),
        "block_size": choose(4, 16),
        "num_local_experts": choose(2, 5),
        "num_experts_per_tok": choose(1, 2),
        **factors,
        **sizes,
    }
