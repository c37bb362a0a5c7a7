"""Fill-in-the-middle: what stands before and behind a gap, as models were trained to fill it."""

from ridgeline.core.errors import RequestError
from ridgeline.text.tokenizer import Tokenizer

_TOKENS = (  # before what stands before, before what stands behind, at the gap
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)


def infill_ids(tokenizer: Tokenizer, before: str, behind: str) -> list[int]:
    """Return the prompt's token ids. Raises RequestError for a tokenizer without the tokens of a known model."""
    for names in _TOKENS:
        ids = [token_id for name in names if (token_id := tokenizer.token_id(name)) is not None]
        if len(ids) == len(names):
            texts = [tokenizer.encode(text, add_special_tokens=False) for text in (before, behind)]
            return [*tokenizer.encode(""), ids[0], *texts[0], ids[1], *texts[1], ids[2]]
    raise RequestError("suffix needs a model that fills in the middle: this one has no tokens for it", param="suffix")
