"""Tokenizers from the metadata of GGUF files: equal to the tokenizer.json of the same model, and to published ids."""

import json

import pytest
import tokenizers

from ridgeline.core.errors import ModelLoadError
from ridgeline.text.gguf import gguf_tokenizer
from ridgeline.text.pretokenizers import PRE_TOKENIZERS
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.gguf.reader import GgufFile

KEYS = "tokenizer.ggml."
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two spaces,\n\n\tlines   and tabs \r\n end ",
    "I've we'LL it's 3.14159 1234567 ½",
    "naïve Ünïcödé 日本語 한국어 Ελληνικά עברית 🙂👩‍👩‍👧",
    "def f(x):\n    return x**2  # !?!",
    "cafe\u0301",
    "a</s>b<s> <unk>",
]


def named_ids(tokenizer):
    """The ids of bos, eos and pad."""
    names = [tokenizer.special_tokens.get(f"{name}_token") for name in ("bos", "eos", "pad")]
    return tuple(None if token is None else tokenizer.token_id(token) for token in names)


@pytest.fixture(scope="module")
def vectors(shared_data):
    def read(name):
        folder = shared_data / "tokenizers"
        texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        ids = (folder / f"ggml-vocab-{name}.gguf.out").read_text(encoding="utf-8").splitlines()
        return list(zip(texts, [[int(item) for item in line.split()] for line in ids]))

    return read


def metadata_of(file, *, pre, bos=None, add_bos=None):
    """What llama.cpp's converter writes for a byte-level tokenizer.json."""
    vocab = dict(file["model"]["vocab"])
    added = {token["content"]: token for token in file["added_tokens"]}
    vocab |= {content: token["id"] for content, token in added.items()}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = [(3 if added[token]["special"] else 4) if token in added else 1 for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in file["model"]["merges"]]
    own = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}
    own |= {"bos_token_id": bos} if bos is not None else {}
    own |= {"add_bos_token": add_bos} if add_bos is not None else {}
    return {f"{KEYS}{key}": value for key, value in own.items()}


def trained(pre_tokenizer):
    """A small byte-level tokenizer.json whose words `pre_tokenizer` cuts."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = pre_tokenizer
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    raw.train_from_iterator([*TEXTS, "the cat sat on the mat, we'll see 2024 1999  12345"] * 30, trainer)
    return raw


def test_published_ids_of_gpt2(shared_data, vectors):
    path = shared_data / "tokenizers" / "ggml-vocab-gpt-2.gguf"
    tokenizer = gguf_tokenizer(GgufFile.open(path).metadata, path)
    assert tokenizer.byte_level
    assert tokenizer.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    for text, ids in vectors("gpt-2"):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_published_ids_of_qwen2(shared_data, vectors, tmp_path):
    folder = shared_data / "tokenizers" / "qwen2"
    metadata = metadata_of(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), pre="qwen2")
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    original = Tokenizer.from_folder(folder)
    tokenizer = gguf_tokenizer(metadata, tmp_path)
    assert tokenizer.vocab_size == original.vocab_size
    assert tokenizer.special_ids == original.special_ids
    assert tokenizer.chat_templates == {"default": "{{ messages }}"}
    for text, ids in vectors("qwen2"):
        assert tokenizer.encode(text) == ids
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(original.encode(text)) == original.decode(original.encode(text))


def test_sentencepiece_equals_the_tokenizer_json(shared_data, vectors):
    folder = shared_data / "models" / "stories260K"
    path = folder / "stories260K.gguf"
    original, tokenizer = Tokenizer.from_folder(folder), gguf_tokenizer(GgufFile.open(path).metadata, path)
    assert tokenizer.byte_fallback
    assert tokenizer.special_ids == original.special_ids
    assert named_ids(tokenizer) == (1, 2, None)
    for text in [*TEXTS, *(text for text, _ in vectors("llama-spm"))]:
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == original.decode(ids)
    assert len(tokenizer.encode("I believe the meaning of life is")) == 18


Split, Regex, Sequence = tokenizers.pre_tokenizers.Split, tokenizers.Regex, tokenizers.pre_tokenizers.Sequence
ByteLevel, Digits = tokenizers.pre_tokenizers.ByteLevel, tokenizers.pre_tokenizers.Digits
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {  # as the models' own tokenizer.json files have them
    "gpt-2": ByteLevel(add_prefix_space=False),
    "llama-bpe": Sequence([Split(Regex(LLAMA3), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]),
    "qwen2": Sequence(
        [Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    ),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "starcoder": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "falcon": Sequence(
        [
            tokenizers.pre_tokenizers.Punctuation("contiguous"),
            ByteLevel(add_prefix_space=False),
            Digits(individual_digits=False),
            Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_as_by_the_models_own_file(pre, tmp_path):
    raw = trained(WORDS[pre])
    tokenizer = gguf_tokenizer(metadata_of(json.loads(raw.to_str()), pre=pre, bos=0, add_bos=False), tmp_path)
    for text in TEXTS:
        text = text.replace("cafe\u0301", "café")
        assert tokenizer.encode(text) == raw.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_kind_keeps_all_of_a_text(pre, tmp_path):
    raw = trained(ByteLevel(add_prefix_space=False))
    tokenizer = gguf_tokenizer(metadata_of(json.loads(raw.to_str()), pre=pre, bos=0), tmp_path)
    begins = PRE_TOKENIZERS[pre].add_bos
    for text in TEXTS:
        text = text.replace("cafe\u0301", "café")
        ids = tokenizer.encode(text)
        assert ids[:begins] == [0] * begins
        assert tokenizer.decode(ids[begins:], skip_special_tokens=False) == text


SPM = {
    f"{KEYS}model": "llama",
    f"{KEYS}tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁a", "▁ab", "<0x21>"],
    f"{KEYS}scores": [0.0, 0.0, 0.0, -9.0, -5.0, -6.0, -3.0, -2.0, -1.0, 0.0],
    f"{KEYS}token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 6],
    f"{KEYS}bos_token_id": 1,
    f"{KEYS}eos_token_id": 2,
}


def test_sentencepiece_options(tmp_path):
    assert gguf_tokenizer(SPM, tmp_path).encode("ab ab!") == [1, 8, 8, 9]
    bare = gguf_tokenizer(SPM | {f"{KEYS}add_space_prefix": False, f"{KEYS}add_bos_token": False}, tmp_path)
    assert bare.encode("ab ab") == [6, 8]
    assert bare.decode([8, 6]) == " abab"
    ended = gguf_tokenizer(SPM | {f"{KEYS}add_eos_token": True}, tmp_path)
    assert ended.encode("a") == [1, 7, 2]
    named = SPM | {"tokenizer.chat_template": "x", "tokenizer.chat_templates": ["tool_use"]}
    templates = gguf_tokenizer(named | {"tokenizer.chat_template.tool_use": "y"}, tmp_path).chat_templates
    assert templates == {"default": "x", "tool_use": "y"}


def test_no_tokenizer(tmp_path):
    assert gguf_tokenizer({}, tmp_path) is None
    assert gguf_tokenizer({f"{KEYS}model": "no_vocab"}, tmp_path) is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": "rwkv"}, "model 'rwkv' is not supported; supported: gpt2, llama"),
        ({"model": 3}, "model=3 is invalid"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a", "a"]}, "none of them twice"),
        ({"tokens": []}, "must be from 1 to"),
        ({"tokens": ["x" * 2000, "b"]}, "more than 1024 characters"),
        ({"scores": None}, "scores must be a finite number for every token"),
        ({"scores": [0.0]}, "scores must be 10 numbers, one for every token"),
        ({"scores": [float("nan")] * 10}, "scores must be a finite number"),
        ({"token_type": ["x"] * 10}, "token_type must be 10 numbers"),
        ({"bos_token_id": 10}, "bos_token_id is 10, but there are 10 tokens"),
        ({"eos_token_id": -1}, "eos_token_id=-1 is invalid"),
        ({"add_bos_token": 1}, "add_bos_token=1 is invalid"),
        ({"model": "gpt2", "pre": "klingon"}, "pre 'klingon' is a kind of words that is not supported; .* qwen2"),
        ({"model": "gpt2"}, "merges is missing"),
        ({"model": "gpt2", "merges": ["ab"]}, "'ab' is not two tokens"),
        ({"model": "gpt2", "merges": ["a zz"]}, "not a usable tokenizer"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces=True is not supported"),
    ],
)
def test_a_broken_tokenizer_is_refused(change, match, tmp_path):
    metadata = SPM | {f"{KEYS}{key}": value for key, value in change.items()}
    with pytest.raises(ModelLoadError, match=match) as caught:
        gguf_tokenizer(metadata, tmp_path / "model.gguf")
    assert "model.gguf" in str(caught.value)
