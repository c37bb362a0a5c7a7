"""The tokenizer that a model folder has: tokenizer.json, its two companions, and the sources of the chat templates.

Called by the front ends (encode), the incremental detokenizer (decode) and the server (log-probability display).
Model files are untrusted: everything is checked before or while it is read, and each defect is one ModelLoadError that
names the file. Must not import torch or transformers.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn, cast

import msgspec
import tokenizers

from ridgeline.core.errors import ModelLoadError, RequestError
from ridgeline.text.stages import MAX_GROWTH, growth_of, no_panic
from ridgeline.text.truncation import shortened

MAX_FILE_BYTES = 256 * 2**20
MAX_TEMPLATE_BYTES = 256 * 2**10
MAX_VOCAB = 2**22
MAX_TOKEN_CHARS = 1024

_NULL = msgspec.Raw(b"null")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Json = dict[str, object]
Texts = dict[str, str]  # by name
Token = Annotated[str, msgspec.Meta(max_length=MAX_TOKEN_CHARS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOCAB)]


class _Model(msgspec.Struct):
    """Reads what all kinds of model have, and the options of BPE by the names of the Rust library."""

    vocab: dict[Token, TokenId] | list[tuple[Token, float]]  # a list is Unigram's: tokens with scores, by id
    type: str | None = None
    merges: list[tuple[str, str] | str] | None = None  # of BPE: pairs, in older files texts with a space between
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _AddedToken(msgspec.Struct):
    content: Token
    id: TokenId
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _TokenizerJson(msgspec.Struct):
    """A tokenizer.json as it is read here; the parts that are Raw are for the Rust library."""

    model: _Model
    added_tokens: list[_AddedToken] | None = None
    decoder: object = None
    version: object = "1.0"
    truncation: msgspec.Raw = _NULL
    padding: msgspec.Raw = _NULL
    normalizer: msgspec.Raw = _NULL
    pre_tokenizer: msgspec.Raw = _NULL
    post_processor: msgspec.Raw = _NULL

    @property
    def largest_id(self) -> int:
        """Return the largest id of the model's own tokens; -1 without any."""
        vocab = self.model.vocab
        return len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)


class _NamedToken(msgspec.Struct):
    content: Token
    special: bool = False


class _Template(msgspec.Struct):
    name: str
    template: str


class _Companion(msgspec.Struct):
    """Reads the files beside tokenizer.json: tokenizer_config.json, special_tokens_map.json, chat_template.json."""

    bos_token: Token | _NamedToken | None = None
    eos_token: Token | _NamedToken | None = None
    unk_token: Token | _NamedToken | None = None
    sep_token: Token | _NamedToken | None = None
    pad_token: Token | _NamedToken | None = None
    cls_token: Token | _NamedToken | None = None
    mask_token: Token | _NamedToken | None = None
    added_tokens_decoder: dict[TokenId, _NamedToken] | None = None
    chat_template: str | list[_Template] | None = None

    @property
    def named(self) -> dict[str, str]:
        """Return bos_token, eos_token and so on, those that the file has."""
        found = {key: value for key, value in msgspec.structs.asdict(self).items() if key.endswith("_token")}
        contents = {key: value.content if isinstance(value, _NamedToken) else value for key, value in found.items()}
        return {key: content for key, content in contents.items() if content is not None}


class Tokenizer:
    """Text to token ids and back, exactly as the folder's tokenizer.json says.

    `encode` adds the special tokens of tokenizer.json's post-processor and no others: like transformers 5, it does not
    read add_bos_token and add_eos_token, which only repeat what the post-processor already does.

    Attributes:
        vocab_size: one past the largest id that has a token; the model's logits may be wider (padding).
        special_ids: ids that `decode(..., skip_special_tokens=True)` leaves out.
        special_tokens: the named ones that are set, e.g. {"bos_token": "<s>"}; the variables of chat templates.
        chat_templates: template sources by name; "default" is the usual one, "tool_use" serves requests with tools.
        byte_level: every token stands for bytes, in the alphabet of GPT-2's byte-level BPE.
        joins_bytes: byte_level, and a text is the bytes of its tokens end to end, read as UTF-8, and nothing more.
        byte_fallback: tokens like <0xE2> stand for one byte each, as in sentencepiece.
    """

    def __init__(self, raw: tokenizers.Tokenizer, file: _TokenizerJson, named: Texts, templates: Texts) -> None:
        added = raw.get_added_tokens_decoder()
        steps = _decoder_steps(file.decoder)
        kinds = {step.get("type") for step in steps}
        self._raw = raw
        self._replacements = _literal_replacements(steps)
        self.vocab_size = 1 + max(file.largest_id, *added, -1)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = named
        self.chat_templates = templates
        self.byte_level = "ByteLevel" in kinds
        self.joins_bytes = [step.get("type") for step in steps] == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self._pieces: list[str | bytes | None] = [None] * self.vocab_size  # of the tokens that were asked for

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """Return the tokenizer of a model folder; None without a tokenizer.json: callers then work on token ids.

        Raises ModelLoadError, naming the file, for anything broken, hostile or of the wrong type.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        config = _read_companion(folder / "tokenizer_config.json")
        named = {**_read_companion(folder / "special_tokens_map.json").named, **config.named}
        templates, content = _chat_templates(folder, config), _read_bytes(path, MAX_FILE_BYTES)
        return cls.from_json(content, path, named, templates, config.added_tokens_decoder)

    @classmethod
    def from_json(
        cls, content: bytes, path: Path, named: Texts, templates: Texts, added: Mapping[int, _NamedToken] | None = None
    ) -> "Tokenizer":
        """Return the tokenizer of the tokenizer.json in `content`, which was made from the file at `path`.

        `added` are the tokens that tokenizer_config.json has beyond it, by id. Raises ModelLoadError, naming the file,
        for anything broken, hostile or of the wrong type.
        """
        file = _read_tokenizer_json(content, path)
        raw = _build(file, content, path)
        _add_config_tokens(raw, added or {}, path.with_name("tokenizer_config.json"))
        tokenizer = cls(raw, file, named, templates)
        _try_out(tokenizer, path)
        return tokenizer

    def to_json(self) -> str:
        """Return tokenizer.json with all added tokens, as the folder's other files give them."""
        return self._raw.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, in which special tokens that are written out become theirs.

        Raises RequestError for a lone surrogate, which no encoding of text can carry, and where the tokenizer fails.
        """
        return self.encoding(text, add_special_tokens=add_special_tokens).ids

    def encoding(
        self, text: str, other: str | None = None, *, add_special_tokens: bool = True, most: int | None = None
    ) -> tokenizers.Encoding:
        """Return the tokens, at most `most`, of a text, or of two that a model reads together; as `encode`."""
        try:
            with no_panic():
                if most is None:
                    return self._raw.encode(text, other, add_special_tokens=add_special_tokens)
                return shortened(self._raw, text, other, most)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from error
        except Exception as error:  # a panic, or a text that the vocabulary cannot spell
            raise RequestError(f"this model's tokenizer fails on the text: {str(error)[:200]}") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids` on their own, through tokenizer.json's decoder; ids without a token give nothing.

        Raises PanicError where the tokenizer fails.
        """
        with no_panic():
            return self._raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return the token as tokenizer.json spells it, e.g. "▁Hello" or "Ġworld"; None where the id has no token."""
        return self._raw.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as tokenizer.json spells it, or None."""
        return self._raw.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for in a text, b" world" for "Ġworld" and "▁world"; b"" without a token."""
        piece = self.piece(token_id)
        return piece.encode() if isinstance(piece, str) else piece

    def piece(self, token_id: int) -> str | bytes:
        """Return the text of a token whose bytes are whole characters, the bytes of any other and of special tokens."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        piece = self._pieces[token_id]
        if piece is None:
            piece = self._bytes_of(token_id)
            if token_id not in self.special_ids:
                with suppress(UnicodeDecodeError):
                    piece = piece.decode()
            self._pieces[token_id] = piece
        return piece

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return token.translate(_LATIN_1_OF).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        if self.is_byte_token(token_id):
            return bytes.fromhex(token[3:5])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()

    def is_byte_token(self, token_id: int) -> bool:
        """Tell whether this is a sentencepiece byte token such as <0xE2>, which the decoder joins with its like."""
        return self.byte_fallback and _BYTE_TOKEN.fullmatch(self.token(token_id) or "") is not None


def _latin_1_of() -> dict[int, str]:
    """Return the translation of GPT-2's printable stand-ins for bytes (a byte itself if printable, else the next from
    U+0100 on) to the characters that Latin-1 encodes as these bytes; what stands for none leaves Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    of_hidden = {0x100 + i: chr(byte) for i, byte in enumerate(hidden)}
    return dict.fromkeys(hidden, "\uffff") | {byte: chr(byte) for byte in printable} | of_hidden


_LATIN_1_OF: Mapping[int, str] = _latin_1_of()


def _fail(path: Path, what: str) -> NoReturn:
    raise ModelLoadError(f"{path}: {what}; download the model's tokenizer files again")


def _read_bytes(path: Path, limit_bytes: int) -> bytes:
    try:
        if not path.is_file():
            _fail(path, "not a regular file")
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        _fail(path, f"cannot be read ({error.strerror})")
    if len(content) > limit_bytes:
        _fail(path, f"larger than {limit_bytes} bytes")
    return content


def _read_companion(path: Path) -> _Companion:
    """Return what is read of a file beside tokenizer.json; nothing of one that is not there."""
    if not path.exists():
        return _Companion()
    try:
        return msgspec.convert(json.loads(_read_bytes(path, MAX_FILE_BYTES).decode()), _Companion, str_keys=True)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        _fail(path, f"not the JSON of a tokenizer ({type(error).__name__}: {str(error)[:200]})")


def _read_tokenizer_json(content: bytes, path: Path) -> _TokenizerJson:
    """Check that ids and tokens are in range and unique: the Rust library sizes tables by what the file says."""
    try:
        file = msgspec.json.decode(content, type=_TokenizerJson)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        _fail(path, f"not the JSON of a tokenizer ({type(error).__name__}: {str(error)[:200]})")
    vocab = file.model.vocab
    if isinstance(vocab, dict) and len(set(vocab.values())) != len(vocab):
        _fail(path, "two vocabulary entries share one id")
    try:
        raw = (file.normalizer, file.pre_tokenizer, file.post_processor)
        growth = max(map(growth_of, (file.decoder, *map(msgspec.json.decode, raw))))
    except (ValueError, struct.error, RecursionError):
        _fail(path, "holds a stage that cannot be read")
    if growth > MAX_GROWTH:
        _fail(path, f"makes texts {growth} times as long, more than {MAX_GROWTH}")
    return file


def _build(file: _TokenizerJson, content: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        with no_panic():
            raw = _byte_pairs(file) or tokenizers.Tokenizer.from_buffer(content)
            raw.no_truncation()
            raw.no_padding()
    except Exception as error:
        _fail(path, f"not a usable tokenizer ({str(error)[:200]})")
    return raw


def _byte_pairs(file: _TokenizerJson) -> tokenizers.Tokenizer | None:
    """Build a BPE tokenizer from its decoded parts; None for other kinds and for merges that are texts.

    The Rust library takes twice as long to read pairs from JSON as to take them decoded.
    """
    model = msgspec.structs.asdict(file.model)
    kind, merges = model.pop("type"), model["merges"]
    if kind != "BPE" or not merges or isinstance(merges[0], str):
        return None
    rest = msgspec.structs.replace(file, model=_Model({}, "BPE", []), added_tokens=[])
    raw = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(rest))
    raw.model = tokenizers.models.BPE(**{name: value for name, value in model.items() if value is not None})
    added = [msgspec.structs.asdict(token) for token in file.added_tokens or ()]
    for token in added:
        del token["id"]  # given by the order
    raw.add_tokens([tokenizers.AddedToken(**token) for token in added])
    return raw


def _try_out(tokenizer: Tokenizer, path: Path) -> None:
    """Run every stage once, so that a file that parses but cannot work is refused at load."""
    try:
        ids = tokenizer.encode("a b\n1")
        tokenizer.decode(ids)
    except Exception as error:
        _fail(path, f"cannot encode a short text ({str(error)[:200]})")
    if any(token_id >= tokenizer.vocab_size for token_id in ids):
        _fail(path, f"encodes to ids outside its vocabulary of {tokenizer.vocab_size}")


def _add_config_tokens(raw: tokenizers.Tokenizer, added: Mapping[int, _NamedToken], path: Path) -> None:
    """Add the tokens that only tokenizer_config.json's `added_tokens_decoder` knows; their ids must follow on."""
    for token_id, token in sorted(added.items()):
        content = token.content
        if raw.token_to_id(content) is None:
            raw.add_tokens([tokenizers.AddedToken(content, special=token.special, normalized=not token.special)])
        if (found := raw.token_to_id(content)) != token_id:
            _fail(path, f"added token {content[:40]!r} has id {token_id}, but {found} by tokenizer.json")


def _chat_templates(folder: Path, config: _Companion) -> dict[str, str]:
    """Return template sources by name. A template file of its own replaces whatever tokenizer_config.json holds."""
    jinja_path, json_path = folder / "chat_template.jinja", folder / "chat_template.json"
    path, value = folder / "tokenizer_config.json", config.chat_template
    if jinja_path.exists():
        try:
            path, value = jinja_path, _read_bytes(jinja_path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError:
            _fail(jinja_path, "is not UTF-8 text")
    elif json_path.exists():
        path, value = json_path, _read_companion(json_path).chat_template
    named = [_Template("default", value)] if isinstance(value, str) else value or []
    for each in named:
        if len(each.template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
            _fail(path, f"chat template {each.name[:40]!r} is larger than {MAX_TEMPLATE_BYTES} bytes")
    return {each.name: each.template for each in named}


def _decoder_steps(decoder: object) -> list[Json]:
    """Return the decoder of tokenizer.json, which the Rust library has accepted, as a flat list of steps."""
    if not isinstance(decoder, dict):
        return []
    step = cast("Json", decoder)
    if step.get("type") != "Sequence":
        return [step]
    return [leaf for part in cast("list[object]", step.get("decoders", [])) for leaf in _decoder_steps(part)]


def _literal_replacements(steps: Sequence[Json]) -> list[tuple[str, str]]:
    """Return what the decoder writes for marker characters inside a token, e.g. "▁" as " "."""
    pairs: list[tuple[str, str]] = []
    for step in steps:
        if step.get("type") == "Metaspace":
            pairs.append((str(step["replacement"]), " "))
        elif step.get("type") == "Replace":
            literal = cast("Json", step["pattern"]).get("String")
            pairs.extend([(literal, str(step["content"]))] if isinstance(literal, str) else [])
    return pairs
