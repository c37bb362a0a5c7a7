"""Encode texts to a bounded number of tokens, special tokens with them, as transformers does with `longest_first`."""

import tokenizers


def shortened(raw: tokenizers.Tokenizer, text: str, other: str | None, most: int) -> tokenizers.Encoding:
    """Return the tokens of a text, or of two, without the ends for which there is no room; the longer is cut first."""
    parts = [raw.encode(each, add_special_tokens=False) for each in (text, other) if each is not None]
    room = max(0, most - raw.num_special_tokens_to_add(other is not None))
    sizes = [*map(len, parts), 0]
    for part, size, beside in zip(parts, sizes, sizes[1::-1]):
        half = room // 2 if size + (part is parts[-1]) <= beside else room - room // 2
        part.truncate(min(size, max(room - beside, half)))
    return raw.post_process(*parts, add_special_tokens=True)
