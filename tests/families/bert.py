from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    heads = choose(1, 2, 3)
    return {
        "model_type": "bert",
        "vocab_size": choose(97, 131),
        "hidden_size": heads * choose(8, 20),
        "num_hidden_layers": choose(1, 2, 3),
        "num_attention_heads": heads,
        "intermediate_size": choose(40, 72),
        "hidden_act": choose("gelu", "relu"),
        "max_position_embeddings": choose(64, 128),
        "type_vocab_size": choose(1, 2),
        "layer_norm_eps": choose(1e-12, 1e-5),
    }
