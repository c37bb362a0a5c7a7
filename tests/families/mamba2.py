from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    groups, expand = choose(1, 2, 3), choose(1, 2)
    heads, head_dim = groups * choose(2, 4), choose(4, 8)
    return {
        "model_type": "mamba2",
        "vocab_size": choose(97, 131, 256),
        "hidden_size": heads * head_dim // expand,
        "num_heads": heads,
        "head_dim": head_dim,
        "n_groups": groups,
        "expand": expand,
        "state_size": choose(4, 16),
        "num_hidden_layers": choose(1, 2, 3),
        "layer_norm_epsilon": choose(1e-6, 1e-5),
        "conv_kernel": choose(2, 4),
        "use_bias": choose(False, True),
        "use_conv_bias": choose(False, True),
        "time_step_limit": choose((0.0, float("inf")), (0.05, 0.6)),
        "chunk_size": choose(4, 16),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
