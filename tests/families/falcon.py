from tiny_parts import Choose, tiny_rope


def tiny(choose: Choose) -> dict[str, object]:
    kv_heads = choose(1, 2)
    heads, head_dim = kv_heads * choose(1, 2, 3, 4), choose(8, 20, 64)  # whose ALiBi slopes are exact in bfloat16
    kind = choose("multi query", "grouped", "one norm", "alibi", "alibi, multi query")
    shapes: dict[str, dict[str, object]] = {
        "multi query": {"multi_query": True, "parallel_attn": choose(True, False)},
        "grouped": {"new_decoder_architecture": True, "num_kv_heads": kv_heads},
        "one norm": {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": 1},
        "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False},
        "alibi, multi query": {"alibi": True, "multi_query": True},
    }
    return {
        "model_type": "falcon",
        "vocab_size": choose(97, 131, 256),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_hidden_layers": choose(1, 2, 3),
        "bias": choose(False, True),
        "activation": choose("gelu", "relu"),
        "ffn_hidden_size": choose(None, 40),
        "layer_norm_epsilon": choose(1e-5, 1e-3),
        "max_position_embeddings": choose(24, 128),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **tiny_rope(choose, head_dim),
        **shapes[kind],
    }
