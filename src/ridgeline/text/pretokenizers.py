"""How byte-level BPE tokenizers cut a text into words, by the name that GGUF files have for it (tokenizer.ggml.pre).

The table is pretokenizers.toml. What a pattern matches is a piece, and so is what lies between two matches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.core.files import read_toml


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token is that token; `add_bos`: a text begins with one, unless the file says.

    `nfc`: a text is brought into normal form C first.
    """

    patterns: Sequence[str]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: PreTokenizer(**row) for row in read_toml(__file__, "pretokenizers.toml")["kind"] for name in row.pop("names")
}
