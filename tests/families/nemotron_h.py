from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    groups, kv_heads = choose(1, 2), choose(1, 2)
    pattern = choose("M", "*") + "".join(choose("M", "M", "*", "-") for _ in range(choose(1, 2, 3)))
    return {
        "model_type": "nemotron_h",
        "vocab_size": choose(97, 131, 256),
        "hidden_size": choose(32, 54),
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "layer_norm_epsilon": choose(1e-6, 1e-5),
        "intermediate_size": choose(40, 72),
        "mlp_hidden_act": choose("relu2", "silu"),
        "mlp_bias": choose(False, True),
        "num_attention_heads": kv_heads * choose(1, 2, 3),
        "num_key_value_heads": kv_heads,
        "head_dim": choose(8, 20),
        "mamba_num_heads": groups * choose(2, 4),
        "mamba_head_dim": choose(4, 8),
        "ssm_state_size": choose(4, 16),
        "n_groups": groups,
        "conv_kernel": choose(2, 4),
        "use_bias": choose(False, True),
        "use_conv_bias": choose(False, True),
        "time_step_min": choose(0.001, 0.4),
        "chunk_size": choose(4, 16),
        "max_position_embeddings": choose(24, 128),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
