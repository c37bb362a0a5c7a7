from tiny_parts import Choose, tiny_hybrid


def tiny(choose: Choose) -> dict[str, object]:
    config = tiny_hybrid(choose)
    groups = choose(1, 2)
    num_layers = config["num_hidden_layers"]
    assert isinstance(num_layers, int)
    return {
        "model_type": "bamba",
        **config,
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        "attn_layer_indices": [i for i in range(num_layers) if choose(False, True)],
        "rope_theta": choose(10000.0, 500000.0),
        "mamba_n_groups": groups,
        "mamba_n_heads": groups * choose(2, 4),
        "mamba_d_head": "auto",
        "mamba_chunk_size": choose(4, 16),
        "time_step_limit": choose((0.0, float("inf")), (0.05, 0.6)),
    }
