from tiny_parts import Choose, tiny_heads


def tiny(choose: Choose) -> dict[str, object]:
    heads, _, head_dim = tiny_heads(choose)
    return {
        "model_type": "gpt2",
        "vocab_size": choose(97, 131, 256),
        "n_embd": heads * head_dim,
        "n_head": heads,
        "n_layer": choose(1, 2, 3),
        "n_inner": choose(None, 40),
        "n_positions": choose(48, 64),
        "activation_function": choose("gelu_new", "relu", "gelu"),
        "layer_norm_epsilon": choose(1e-5, 1e-3),
        "scale_attn_weights": choose(True, True, False),
        "scale_attn_by_inverse_layer_idx": choose(False, True),
        "tie_word_embeddings": choose(True, False),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
