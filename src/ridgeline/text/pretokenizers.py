r"""How byte-level BPE tokenizers cut a text into words, by the name that GGUF files have for it (tokenizer.ggml.pre).

A kind is patterns of which each cuts what the ones before it left: what a pattern matches is a piece, and so is what
lies between two matches. The patterns are those of the tokenizer.json files that the names stand for. Called by
gguf.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d|{_WORDS}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = "|".join([*(cased + _CONTRACTION for cased in _CASED), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES])
_TEKKEN = "|".join([*_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES])
_HAN = "[一-龥ࠀ-一가-퟿]+"
# The letters with case that DeepSeek LLM knows, not quite those of Unicode; escaped where normal form C is another.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ"
    "ῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = ["[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}+"]
_SYMBOL_OR_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_V3 = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", rf"{_SYMBOL_OR_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token is that token; `add_bos`: a text begins with one, unless the file says.

    `nfc`: a text is brought into normal form C first.
    """

    patterns: Sequence[str]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_BY_PATTERNS: Sequence[tuple[str, PreTokenizer]] = (
    ("default", PreTokenizer([r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"])),
    ("gpt-2 phi-2 mpt olmo jais roberta-bpe gigachat", PreTokenizer([_GPT2])),
    ("llama-bpe llama3 llama-v3 falcon3", PreTokenizer([_CL100K % r"\p{N}{1,3}"], ignore_merges=True, add_bos=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer([_CL100K % r"\p{N}{1,3}"])),
    ("qwen2", PreTokenizer([_CL100K % r"\p{N}"], nfc=True)),
    ("deepseek-r1-qwen stablelm2 megrez", PreTokenizer([_CL100K % r"\p{N}"])),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", PreTokenizer([r"\p{N}", _GPT2])),
    ("falcon", PreTokenizer([r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"])),
    ("gpt-4o", PreTokenizer([_GPT4O])),
    ("llama4", PreTokenizer([_GPT4O], ignore_merges=True, add_bos=True)),
    ("tekken", PreTokenizer([_TEKKEN], ignore_merges=True, add_bos=True)),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
    ("deepseek-coder", PreTokenizer(["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"])),
    ("deepseek-v3", PreTokenizer(_DEEPSEEK_V3)),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: kind for names, kind in _BY_PATTERNS for name in names.split()}
