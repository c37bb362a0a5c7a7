"""Texts cut to a number of tokens are those that the tokenizers library cuts by itself, longest first."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from ridgeline.text.truncation import shortened


@pytest.mark.parametrize("other", [None, *range(9)])
@pytest.mark.parametrize("size", range(9))
def test_as_the_library_cuts(size: int, other: int | None) -> None:
    raw = tokenizers.Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3}, unk_token="[SEP]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    theirs = tokenizers.Tokenizer.from_str(raw.to_str())
    texts = " ".join("a" * size), None if other is None else " ".join("b" * other)
    for most in range(4, 16):
        theirs.enable_truncation(most)
        expected, found = theirs.encode(*texts), shortened(raw, *texts, most)
        assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids), most
