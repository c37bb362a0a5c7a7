from families import bert
from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    return bert.tiny(choose) | {"model_type": "xlm-roberta", "pad_token_id": choose(0, 1), "type_vocab_size": 1}
