from tiny_parts import Choose, tiny_hybrid


def tiny(choose: Choose) -> dict[str, object]:
    num_experts, attn_period, expert_period = choose(1, 4), choose(2, 3), choose(1, 2)
    return {
        "model_type": "jamba",
        **tiny_hybrid(choose),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, min(2, num_experts)),
        "attn_layer_period": attn_period,
        "attn_layer_offset": choose(0, attn_period - 1),
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_period - 1,
        "mamba_dt_rank": choose("auto", 3),
    }
