from tiny_parts import ORIGINAL_CONTEXT, Choose, tiny_attention, tiny_longrope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    partial = choose(1.0, 0.5)
    rope: dict[str, object] = {"rope_theta": 10000.0}
    if choose(False, True):
        rope["rope_scaling"] = {"type": "longrope", **tiny_longrope(choose, int(head_dim * partial))}
    return {
        "model_type": "phi3",
        **attention,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "sliding_window": choose(None, 1, 4, 16, 64),
        **tiny_sizes(choose),
        **rope,
    }
