from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    heads = choose(1, 2, 4)
    vocab_size = choose(97, 256)
    return {
        "model_type": "llada",
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": heads * choose(8, 20),
        "embedding_size": vocab_size,
        "include_bias": False,
        "include_qkv_bias": choose(False, True),
        "layer_norm_type": "rms",
        "mask_token_id": vocab_size - 1,
        "max_sequence_length": choose(64, 128),
        "mlp_hidden_size": choose(40, 72),
        "n_heads": heads,
        "n_kv_heads": choose(None, heads),
        "n_layers": choose(1, 2, 3),
        "rms_norm_eps": choose(1e-6, 1e-5),
        "rope": True,
        "rope_theta": choose(10000.0, 500000.0),
        "vocab_size": vocab_size,
        "weight_tying": choose(False, True),
    }
