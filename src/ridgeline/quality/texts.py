"""Texts in a model's tokens: documents, cut in windows that predict every token but the first once."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from ridgeline.core.errors import ConfigError
from ridgeline.quality.corpus import split, standard_library
from ridgeline.text.tokenizer import Tokenizer

FEW_DOCUMENTS = 8  # fewer say little about others: their windows do


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts by name, and a word on where they are from."""

    source: str
    by_name: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """The hash of names and texts, in order."""
        return hashlib.sha256(json.dumps(list(self.by_name.items())).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Document:
    """Windows of token ids, and the bytes of text that their predicted tokens stand for."""

    name: str
    windows: Sequence[Sequence[int]]
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted: all but the first of each window."""
        return sum(len(window) - 1 for window in self.windows)


def read_texts(paths: Sequence[Path]) -> Texts:
    """Read files, or the standard library's held-out modules where there are none. Raises ConfigError."""
    if not paths:
        _, held_out = split(standard_library())
        return Texts("held-out modules of the standard library", {file.path: file.text for file in held_out})
    texts: dict[str, str] = {}
    for path in paths:
        try:
            texts[str(path)] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    return Texts("files", texts)


def cut(token_ids: Sequence[int], window: int) -> list[list[int]]:
    """Return windows of at most `window` tokens that predict every token but the first exactly once."""
    starts = range(0, len(token_ids) - 1, window - 1)
    return [list(token_ids[start : start + window]) for start in starts]


def make_documents(texts: Texts, tokenizer: Tokenizer, window: int, max_tokens: int | None) -> list[Document]:
    """Return the texts as documents of windows: of each its first ones, so many that all have about `max_tokens`.

    Every window is a document where there are fewer than FEW_DOCUMENTS texts. Raises ConfigError without any token.
    """
    cuts = {name: cut(tokenizer.encode(text), window) for name, text in texts.by_name.items()}
    taken: dict[str, list[list[int]]] = {name: [] for name in cuts}
    room = max_tokens
    for row in zip_longest(*cuts.values()):
        for name, ids in zip(cuts, row, strict=True):
            if ids is not None and (room is None or room > 0):
                chosen = ids if room is None else ids[: room + 1]
                taken[name].append(chosen)
                room = None if room is None else room - (len(chosen) - 1)
    named = {name: windows for name, windows in taken.items() if windows}
    if len(texts.by_name) < FEW_DOCUMENTS:
        named = {f"{name}:{i}": [ids] for name, windows in named.items() for i, ids in enumerate(windows)}
    documents = [Document(name, windows, _num_bytes(tokenizer, windows)) for name, windows in named.items()]
    documents = [document for document in documents if document.num_bytes]
    if not documents:
        raise ConfigError("the text has fewer than two tokens, so nothing is predicted; give a longer one")
    return documents


def _num_bytes(tokenizer: Tokenizer, windows: Sequence[Sequence[int]]) -> int:
    return sum(len(tokenizer.token_bytes(token_id)) for ids in windows for token_id in ids[1:])
