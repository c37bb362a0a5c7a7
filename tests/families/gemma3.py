from families import gemma3_text
from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    text = gemma3_text.tiny(choose) | {"final_logit_softcapping": None}  # no published one has a cap
    tied = text.pop("tie_word_embeddings")
    return {
        "model_type": "gemma3",
        "text_config": text,
        "tie_word_embeddings": tied,
        "mm_tokens_per_image": 4,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    }
