from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    heads = choose(1, 2, 3, 8, 12)
    return {
        "model_type": "bloom",
        "vocab_size": choose(97, 131, 256),
        choose("hidden_size", "n_embed"): heads * choose(8, 20, 64),
        choose("num_attention_heads", "n_head"): heads,
        choose("num_hidden_layers", "n_layer"): choose(1, 2, 3),
        "layer_norm_epsilon": choose(1e-5, 1e-3),
        "tie_word_embeddings": choose(True, False),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
