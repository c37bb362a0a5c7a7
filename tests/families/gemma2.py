from tiny_parts import Choose, tiny_attention, tiny_layer_types, tiny_rope, tiny_sizes


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "gemma2",
        **attention,
        "query_pre_attn_scalar": choose(16, 224),
        "attn_logit_softcapping": choose(None, 2.0, 50.0),
        "final_logit_softcapping": choose(None, 2.0, 30.0),
        "hidden_activation": choose("gelu_pytorch_tanh", "gelu"),
        "attention_bias": choose(False, True),
        "sliding_window": choose(1, 4, 16, 64),
        "layer_types": choose(None, tiny_layer_types(choose, sizes)),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
