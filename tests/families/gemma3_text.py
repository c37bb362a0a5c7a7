from tiny_parts import Choose, tiny_attention, tiny_layer_types, tiny_local_global_ropes, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "gemma3_text",
        **attention,
        "query_pre_attn_scalar": choose(head_dim, 224),
        "final_logit_softcapping": choose(None, 2.0),
        "hidden_activation": choose("gelu_pytorch_tanh", "gelu"),
        "attention_bias": choose(False, True),
        "sliding_window": choose(1, 4, 16, 64),
        **choose({"layer_types": tiny_layer_types(choose, sizes)}, {"sliding_window_pattern": choose(2, 6)}),
        **sizes,
        **tiny_local_global_ropes(choose, head_dim, local_key="rope_local_base_freq"),
    }
