from tiny_parts import Choose, tiny_partial_rope


def tiny(choose: Choose) -> dict[str, object]:
    kv_heads = choose(1, 2, 3)
    heads, head_dim = kv_heads * choose(1, 2), choose(16, 24, 64)
    return {
        "model_type": "stablelm",
        "vocab_size": choose(97, 131, 256),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": choose(1, 2, 3),
        "intermediate_size": choose(40, 72),
        "layer_norm_eps": choose(1e-5, 1e-3),
        "max_position_embeddings": choose(24, 128),
        "use_qkv_bias": choose(False, True),
        "qk_layernorm": choose(False, True),
        "use_parallel_residual": choose(False, True),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **tiny_partial_rope(choose, head_dim),
    }
