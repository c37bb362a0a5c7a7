"""The tokenizer in a GGUF file's metadata, as a tokenizer.json that says the same, and the other way round.

Nothing in the metadata is trusted: types, lengths and ids are checked here, the rest by what reads any tokenizer.json.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.spec.reader import ConfigReader
from ridgeline.text.pretokenizers import PRE_TOKENIZERS
from ridgeline.text.tokenizer import MAX_TEMPLATE_BYTES, MAX_TOKEN_CHARS, MAX_VOCAB, Json, Tokenizer

KEYS = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
NO_ID = (1 << 32) - 1  # how some files say that there is no such token
MAX_MERGED_CHARS = 1 << 23  # of all tokens that merges are made for; Gemma's 256,000 have 2 million
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}


def gguf_tokenizer(metadata: Mapping[str, object], path: Path) -> Tokenizer | None:
    """Return the tokenizer of the GGUF file at `path`; None where it has none.

    Raises ModelLoadError, naming the file, for a kind that is not known and for anything broken or hostile.
    """
    if metadata.get(f"{KEYS}model", "no_vocab") == "no_vocab":
        return None
    try:
        read = _Reader(metadata)
        content = msgspec.json.encode(read.tokenizer_json())
        named, templates = read.named_tokens(), read.chat_templates()
    except (ConfigError, UnicodeEncodeError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    return Tokenizer.from_json(content, path, named, templates)


class _Reader:
    """Raises ConfigError for what is missing or wrong."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self._read = ConfigReader(metadata, "the metadata")
        self._tokens = self._read.texts(f"{KEYS}tokens")
        if len(set(self._tokens)) != len(self._tokens) or not 0 < len(self._tokens) <= MAX_VOCAB:
            raise ConfigError(f"{KEYS}tokens must be from 1 to {MAX_VOCAB} tokens, none of them twice")
        if max(map(len, self._tokens)) > MAX_TOKEN_CHARS:
            raise ConfigError(f"{KEYS}tokens has a token of more than {MAX_TOKEN_CHARS} characters")
        self._types = self._numbers("token_type") or [NORMAL] * len(self._tokens)

    def tokenizer_json(self) -> Json:
        """Return what tokenizer.json would say."""
        kind = self._read.text(f"{KEYS}model")
        match kind:
            case "gpt2":
                parts = self._byte_level()
            case "llama":
                parts = self._sentencepiece()
            case _:
                raise ConfigError(f"{KEYS}model {kind[:80]!r} is not supported; supported: gpt2, llama")
        as_written = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [
            {"id": token_id, "content": token, "special": kind != USER_DEFINED, **as_written}
            for token_id, (token, kind) in enumerate(zip(self._tokens, self._types))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ]
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}

    def named_tokens(self) -> dict[str, str]:
        """Return bos_token, eos_token and so on, those that the file names."""
        ids = {f"{ours}_token": self._token_id(theirs) for ours, theirs in NAMED.items()}
        return {name: self._tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def chat_templates(self) -> dict[str, str]:
        """Return sources by name."""
        template = "tokenizer.chat_template"
        keys = {"default": template}
        if self._read.has("tokenizer.chat_templates"):
            keys |= {name: f"{template}.{name}" for name in self._read.texts("tokenizer.chat_templates")}
        sources = {name: self._read.text(key) for name, key in keys.items() if self._read.has(key)}
        large = [name for name, source in sources.items() if len(source.encode()) > MAX_TEMPLATE_BYTES]
        if large:
            raise ConfigError(f"chat template {large[0][:40]!r} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return sources

    def _byte_level(self) -> Json:
        name = self._read.text(f"{KEYS}pre", "default")
        if name not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise ConfigError(f"{KEYS}pre {name[:80]!r} is a kind of words that is not supported; supported: {known}")
        kind = PRE_TOKENIZERS[name]
        merges = self._read.texts(f"{KEYS}merges")
        cuts = [merge.find(" ", 1) for merge in merges]
        if min(cuts, default=1) < 0:
            raise ConfigError(f"{KEYS}merges: {merges[cuts.index(-1)][:40]!r} is not two tokens with a space between")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        words = [{**split, "pattern": {"Regex": pattern}} for pattern in kind.patterns]
        return {
            "normalizer": {"type": "NFC"} if kind.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, byte_level]},
            "post_processor": self._post_processor(add_bos=kind.add_bos),
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": dict(zip(self._tokens, range(len(self._tokens)))),
                "merges": [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts)],
                "ignore_merges": kind.ignore_merges,
            },
        }

    def _sentencepiece(self) -> Json:
        self._read.expect(f"{KEYS}remove_extra_whitespaces", False)
        prefix = self._read.flag(f"{KEYS}add_space_prefix", True)
        unknown = self._token_id("unknown")
        if unknown is None and UNKNOWN in self._types:
            unknown = self._types.index(UNKNOWN)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        first = {"type": "Prepend", "prepend": "▁"}
        marks = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        decoders = [marks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        return {
            "normalizer": {"type": "Sequence", "normalizers": [first, spaces]} if prefix else spaces,
            "pre_tokenizer": None,
            "post_processor": self._post_processor(add_bos=True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "vocab": dict(zip(self._tokens, range(len(self._tokens)))),
                "merges": self._merges_of_scores(),
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
            },
        }

    def _merges_of_scores(self) -> list[tuple[str, str]]:
        """Return every cut of a token into two others, best token first: sentencepiece merges the best-scored pair."""
        scores = self._numbers("scores")
        if scores is None or not all(map(math.isfinite, scores)):
            raise ConfigError(f"{KEYS}scores must be a finite number for every token")
        scored = zip(self._tokens, self._types, scores)
        pieces = {token: score for token, kind, score in scored if kind in (NORMAL, UNUSED)}
        if sum(map(len, pieces)) > MAX_MERGED_CHARS:
            raise ConfigError(f"{KEYS}tokens has more than {MAX_MERGED_CHARS} characters")
        merges = [
            (score, token[:cut], token[cut:])
            for token, score in pieces.items()
            for cut in range(1, len(token))
            if token[:cut] in pieces and token[cut:] in pieces
        ]
        merges.sort(key=lambda merge: merge[0], reverse=True)
        return [(left, right) for _, left, right in merges]

    def _post_processor(self, *, add_bos: bool) -> Json | None:
        """Return the tokens that begin and end every text."""
        bos = self._token_id("bos") if self._read.flag(f"{KEYS}add_bos_token", add_bos) else None
        eos = self._token_id("eos") if self._read.flag(f"{KEYS}add_eos_token", False) else None
        specials = {self._tokens[i]: i for i in (bos, eos) if i is not None}

        def text(sequence: str, type_id: int) -> list[Json]:
            body: Json = {"Sequence": {"id": sequence, "type_id": type_id}}
            begin, end = ([] if i is None else [self._tokens[i]] for i in (bos, eos))
            named = [cast("Json", {"SpecialToken": {"id": token, "type_id": type_id}}) for token in (*begin, *end)]
            return [*named[: len(begin)], body, *named[len(begin) :]]

        if not specials:
            return None
        return {
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": [*text("A", 0), *text("B", 1)],
            "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in specials.items()},
        }

    def _token_id(self, kind: str) -> int | None:
        value = self._read.optional_integer(f"{KEYS}{kind}_token_id", low=0, high=NO_ID)
        if value is None or value == NO_ID:
            return None
        if value >= len(self._tokens):
            raise ConfigError(f"{KEYS}{kind}_token_id is {value}, but there are {len(self._tokens)} tokens")
        return value

    def _numbers(self, key: str) -> Sequence[float] | None:
        """Return one number for every token, or None where there are none."""
        values = self._metadata.get(KEYS + key)
        if values is None:
            return None
        numbers = cast("list[float]", values) if isinstance(values, list) else []
        if len(numbers) != len(self._tokens) or isinstance(numbers[0], (str, bool)):
            raise ConfigError(f"{KEYS}{key} must be {len(self._tokens)} numbers, one for every token")
        return numbers


def metadata_of_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos: int | None) -> dict[str, object]:
    """Return what a GGUF file says of a tokenizer, of a model with so many tokens whose texts end with `eos`.

    Raises ConfigError for another kind than byte-level BPE, and words that no name of tokenizer.ggml.pre stands for.
    """
    said: dict[str, Any] = msgspec.json.decode(tokenizer.to_json())
    model, normalizer = said["model"], said.get("normalizer")
    patterns, is_nfc = _patterns(said.get("pre_tokenizer") or {}), normalizer == {"type": "NFC"}
    meant = [name for name, kind in PRE_TOKENIZERS.items() if [*kind.patterns] == patterns and kind.nfc == is_nfc
             and kind.ignore_merges == model.get("ignore_merges", False)]  # fmt: skip
    if model["type"] != "BPE" or not tokenizer.byte_level or not meant or (normalizer is not None and not is_nfc):
        raise ConfigError(
            "this tokenizer is not written as GGUF: only byte-level BPE is, with words that it has a name for"
        )
    ids = {**model["vocab"]}
    ids |= {token["content"]: token["id"] for token in said["added_tokens"]}
    kinds = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in said["added_tokens"]}
    tokens = {token_id: token for token, token_id in ids.items()}
    every = range(max(vocab_size, max(tokens) + 1))
    named = {theirs: ids.get(tokenizer.special_tokens.get(f"{ours}_token", "")) for ours, theirs in NAMED.items()}
    named |= {} if eos is None else {"eos": eos}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    template = tokenizer.chat_templates.get("default")
    return {
        f"{KEYS}model": "gpt2",
        f"{KEYS}pre": meant[0],
        f"{KEYS}tokens": [tokens.get(each, f"[PAD{each}]") for each in every],
        f"{KEYS}token_type": [kinds.get(each, NORMAL if each in tokens else UNUSED) for each in every],
        **({f"{KEYS}merges": merges} if merges else {}),
        **{f"{KEYS}{kind}_token_id": token_id for kind, token_id in named.items() if token_id is not None},
        f"{KEYS}add_bos_token": tokenizer.encode("")[:1] == [named["bos"]],
        **({"tokenizer.chat_template": template} if template else {}),
    }


def _patterns(part: dict[str, Any]) -> list[str]:
    """Return the patterns that cut words one after the other; one that is none where other things do."""
    match part:
        case {"type": "Sequence", "pretokenizers": parts}:
            return [pattern for each in parts for pattern in _patterns(each)]
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return [pattern]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [*PRE_TOKENIZERS["gpt-2"].patterns] if part.get("use_regex", True) else []
        case {"type": "Digits", "individual_digits": True}:
            return [r"\p{N}"]
        case _:
            return [""]
