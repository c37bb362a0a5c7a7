from tiny_parts import Choose, tiny_attention, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    num_experts = choose(1, 3, 8)
    return {
        "model_type": "mixtral",
        **attention,
        "num_local_experts": num_experts,
        "num_experts_per_tok": choose(1, min(2, num_experts), num_experts),
        "sliding_window": choose(None, 4, 64),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
