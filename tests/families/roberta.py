from tiny_parts import Choose

from families import bert


def tiny(choose: Choose) -> dict[str, object]:
    return bert.tiny(choose) | {"model_type": "roberta", "pad_token_id": choose(0, 1), "type_vocab_size": 1}
