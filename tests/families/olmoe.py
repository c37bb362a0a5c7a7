from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    num_experts = choose(2, 5, 16)
    return {
        "model_type": "olmoe",
        **attention,
        "attention_bias": choose(False, True),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, 2, min(8, num_experts)),
        "norm_topk_prob": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
