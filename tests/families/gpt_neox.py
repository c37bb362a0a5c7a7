from tiny_parts import Choose, tiny_partial_rope


def tiny(choose: Choose) -> dict[str, object]:
    heads, head_dim = choose(1, 2, 3, 8), choose(16, 24, 64)
    rope = tiny_partial_rope(choose, head_dim)
    old_names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    return {
        "model_type": "gpt_neox",
        "vocab_size": choose(97, 131, 256),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_hidden_layers": choose(1, 2, 3),
        "intermediate_size": choose(40, 72),
        "attention_bias": choose(True, False),
        "use_parallel_residual": choose(True, False),
        "hidden_act": choose("gelu", "gelu_new", "relu"),
        "layer_norm_eps": choose(1e-5, 1e-3),
        "max_position_embeddings": choose(24, 128),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **{old_names.get(key, key): value for key, value in rope.items()},
    }
