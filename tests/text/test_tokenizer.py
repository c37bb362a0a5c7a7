"""Tokenizer: the published vectors, the same ids as transformers, and one clear error for broken or hostile files."""

import base64
import json
import random
import shutil

import pytest
import tokenizers
from transformers import AutoTokenizer

from ridgeline.core.errors import ModelLoadError, RequestError
from ridgeline.text import tokenizer as tokenizer_module
from ridgeline.text.tokenizer import Tokenizer

TEXTS = ["", " ", "hi", "I believe the meaning of life is", "a\n\n\tb  c", "</s>hi<s> ", "🦙 é 世界", "<0xE2>"]


def named_ids(tokenizer):
    """The ids of bos, eos and pad."""
    names = [tokenizer.special_tokens.get(f"{name}_token") for name in ("bos", "eos", "pad")]
    return tuple(None if token is None else tokenizer.token_id(token) for token in names)


@pytest.mark.parametrize("name", ["qwen2", "llama-spm"])
def test_published_vectors(name, vectors, request):
    tokenizer = request.getfixturevalue(name.replace("-", "_"))
    for text, ids in vectors(name):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text


def test_stories260k(stories):
    ids = stories.encode("I believe the meaning of life is")
    assert len(ids) == 18 and ids[0] == 1
    assert (named_ids(stories), stories.vocab_size) == ((1, 2, None), 512)
    assert stories.special_ids == {0, 1, 2}
    assert stories.decode(ids) == "I believe the meaning of life is"
    assert stories.decode(ids, skip_special_tokens=False).startswith("<s>")


def test_qwen2_ids(qwen2):
    assert (named_ids(qwen2), qwen2.vocab_size) == ((None, 151645, 151643), 151646)
    assert qwen2.special_ids == {151643, 151644, 151645}
    assert qwen2.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert qwen2.encode("<|im_start|>") == [151644] == [qwen2.token_id("<|im_start|>")]


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("has_post_processor", [True, False])
def test_special_tokens_added_as_transformers_adds_them(stories_copy, config, has_post_processor):
    edit(stories_copy, "tokenizer_config.json", lambda data: data.pop("add_bos_token"))
    edit(stories_copy, "tokenizer_config.json", lambda data: data.update(config))
    if not has_post_processor:
        edit(stories_copy, "tokenizer.json", lambda data: data.update(post_processor=None))
    theirs = AutoTokenizer.from_pretrained(stories_copy)
    ours = Tokenizer.from_folder(stories_copy)
    for text in TEXTS:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
            ids = ours.encode(text)
            assert ours.decode(ids, skip_special_tokens=add) == theirs.decode(ids, skip_special_tokens=add)


def test_tokens_as_bytes_and_text(qwen2, llama_spm, vectors):
    for name, tokenizer in (("qwen2", qwen2), ("llama-spm", llama_spm)):
        prefix = b" " if name == "llama-spm" else b""
        for text, ids in vectors(name):
            assert b"".join(map(tokenizer.token_bytes, ids)) == (prefix + text.encode() if text else b"")
    llama_ids = llama_spm.encode("Hello 🦙", add_special_tokens=False)
    assert [llama_spm.token(i) for i in llama_ids] == ["▁Hello", "▁", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]
    assert [llama_spm.token_bytes(i) for i in llama_ids] == [
        b" Hello",
        b" ",
        *(bytes([byte]) for byte in "🦙".encode()),
    ]
    assert qwen2.token_bytes(qwen2.encode(" world")[0]) == b" world"
    assert qwen2.token_bytes(151645) == b"<|im_end|>"
    for token_id in (-1, 151646, 2**40):
        assert (qwen2.token(token_id), qwen2.token_bytes(token_id)) == (None, b"")


def test_lone_surrogate_is_a_request_error(stories):
    with pytest.raises(RequestError, match="Unicode"):
        stories.encode("a\ud800b")


def test_folder_without_tokenizer(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.fixture
def stories_copy(shared_data, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared_data / "models" / "stories260K" / name, tmp_path / name)
    return tmp_path


def edit(folder, name, change):
    data = json.loads((folder / name).read_bytes())
    change(data)
    (folder / name).write_text(json.dumps(data))


def test_only_tokenizer_json_is_needed(stories_copy):
    (stories_copy / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(stories_copy)
    assert named_ids(tokenizer)[0] is None and tokenizer.encode("hi")[0] == 1


@pytest.mark.parametrize("name", ["models/stories260K", "tokenizers/qwen2"])
def test_building_byte_pairs_from_parts_gives_what_the_rust_library_reads(shared_data, name):
    path = shared_data / name / "tokenizer.json"
    content = path.read_bytes()
    built = tokenizer_module._byte_pairs(tokenizer_module._read_tokenizer_json(content, path))
    assert built.to_str() == tokenizers.Tokenizer.from_buffer(content).to_str()


def test_older_and_other_models_are_left_to_the_rust_library(stories_copy):
    def texts(data):
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]

    ids = Tokenizer.from_folder(stories_copy).encode("Once upon a time")
    edit(stories_copy, "tokenizer.json", texts)
    assert Tokenizer.from_folder(stories_copy).encode("Once upon a time") == ids
    edit(stories_copy, "tokenizer.json", lambda data: data["model"].pop("merges"))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(stories_copy)


def test_special_tokens_map_fills_in_what_the_config_leaves_out(stories_copy):
    edit(stories_copy, "tokenizer_config.json", lambda data: data.pop("eos_token"))
    special = {
        "eos_token": {"content": "</s>", "lstrip": False},
        "bos_token": "</s>",
        "pad_token": "<unk>",
        "cls_token": "",
    }
    (stories_copy / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = Tokenizer.from_folder(stories_copy)
    assert named_ids(tokenizer) == (1, 2, 0)
    assert tokenizer.special_tokens["cls_token"] == ""


def test_tokens_that_only_the_config_adds(stories_copy):
    added = {"512": {"content": "<|a|>", "special": True}, "513": {"content": "<tool>", "special": False}}
    edit(stories_copy, "tokenizer_config.json", lambda data: data.update(added_tokens_decoder=added))
    tokenizer = Tokenizer.from_folder(stories_copy)
    assert tokenizer.encode("<|a|><tool>", add_special_tokens=False) == [512, 513]
    assert tokenizer.vocab_size == 514 and 512 in tokenizer.special_ids and 513 not in tokenizer.special_ids


def test_chat_template_sources(stories_copy):
    assert Tokenizer.from_folder(stories_copy).chat_templates == {}
    edit(stories_copy, "tokenizer_config.json", lambda data: data.update(chat_template="one"))
    assert Tokenizer.from_folder(stories_copy).chat_templates == {"default": "one"}
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    edit(stories_copy, "tokenizer_config.json", lambda data: data.update(chat_template=named))
    assert Tokenizer.from_folder(stories_copy).chat_templates == {"default": "two", "tool_use": "three"}
    (stories_copy / "chat_template.json").write_text('{"chat_template": "four"}')
    assert Tokenizer.from_folder(stories_copy).chat_templates == {"default": "four"}
    (stories_copy / "chat_template.jinja").write_text("five")
    assert Tokenizer.from_folder(stories_copy).chat_templates == {"default": "five"}


def set_vocab(token, token_id):
    return lambda data: data["model"]["vocab"].update({token: token_id})


def add_token(**fields):
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **fields}
    return lambda data: data["added_tokens"].append(entry)


def set_path(value, *path):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def growing(length, count):
    """Stages that put a text in place of each letter, one after another."""
    stage = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * length}
    return {"type": "Sequence", "normalizers": [stage] * count, "decoders": [stage] * count}


def nested(depth):
    stage = {"type": "NFC"}
    for _ in range(depth):
        stage = {"type": "Sequence", "normalizers": [stage]}
    return stage


BROKEN = {
    "vocab_negative": ("tokenizer.json", set_vocab("zz", -1)),
    "vocab_huge": ("tokenizer.json", set_vocab("zz", 2**31)),
    "vocab_beyond_u32": ("tokenizer.json", set_vocab("zz", 2**64)),
    "vocab_float": ("tokenizer.json", set_vocab("zz", 1.5)),
    "vocab_bool": ("tokenizer.json", set_vocab("zz", True)),
    "vocab_string_id": ("tokenizer.json", set_vocab("zz", "1")),
    "vocab_shared_id": ("tokenizer.json", set_vocab("zz", 7)),
    "vocab_long_token": ("tokenizer.json", set_vocab("z" * 1025, 512)),
    "vocab_list_of_numbers": ("tokenizer.json", set_path([1, 2], "model", "vocab")),
    "vocab_list_for_bpe": ("tokenizer.json", set_path([["a", 0.0]], "model", "vocab")),
    "vocab_missing": ("tokenizer.json", lambda data: data["model"].pop("vocab")),
    "vocab_null": ("tokenizer.json", set_path(None, "model", "vocab")),
    "merge_of_unknown": ("tokenizer.json", lambda data: data["model"]["merges"].append(["qq", "zz"])),
    "merges_numbers": ("tokenizer.json", set_path([1, 2], "model", "merges")),
    "model_missing": ("tokenizer.json", lambda data: data.pop("model")),
    "model_list": ("tokenizer.json", set_path([], "model")),
    "model_unknown": ("tokenizer.json", set_path("Nonsense", "model", "type")),
    "added_negative": ("tokenizer.json", add_token(id=-5, content="<x>")),
    "added_huge": ("tokenizer.json", add_token(id=2**31, content="<x>")),
    "added_no_id": ("tokenizer.json", add_token(content="<x>")),
    "added_long": ("tokenizer.json", add_token(id=512, content="x" * 1025)),
    "added_number": ("tokenizer.json", add_token(id=512, content=5)),
    "added_string": ("tokenizer.json", lambda data: data["added_tokens"].append("<x>")),
    "added_object": ("tokenizer.json", set_path({"a": 1}, "added_tokens")),
    "decoder_unknown": ("tokenizer.json", set_path({"type": "Nonsense"}, "decoder")),
    "post_processor_ids": (
        "tokenizer.json",
        set_path([70000], "post_processor", "special_tokens", "<s>", "ids"),
    ),
    "normalizer_regex": (
        "tokenizer.json",
        set_path({"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, "normalizer"),
    ),
    "replace_grows": ("tokenizer.json", set_path(growing(1000, 3), "normalizer")),
    "replace_grows_decoding": ("tokenizer.json", set_path(growing(300, 1), "decoder")),
    "prepend_long": ("tokenizer.json", set_path({"type": "Prepend", "prepend": "a" * 5_000_000}, "normalizer")),
    "template_many": (
        "tokenizer.json",
        lambda data: data["post_processor"].update(single=[{"Sequence": {"id": "A", "type_id": 0}}] * 1000),
    ),
    "charsmap_beyond": (
        "tokenizer.json",
        set_path({"type": "Precompiled", "precompiled_charsmap": "/////w=="}, "normalizer"),
    ),
    "charsmap_no_base64": (
        "tokenizer.json",
        set_path({"type": "Precompiled", "precompiled_charsmap": "%"}, "normalizer"),
    ),
    "charsmap_grows": (
        "tokenizer.json",
        set_path(
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\0\0\0\0" + b"x" * 5000).decode()},
            "normalizer",
        ),
    ),
    "stages_deep": ("tokenizer.json", set_path(nested(300), "normalizer")),
    "bos_number": ("tokenizer_config.json", set_path(1, "bos_token")),
    "bos_list": ("tokenizer_config.json", set_path(["<s>"], "bos_token")),
    "bos_content": ("tokenizer_config.json", set_path({"content": 1}, "bos_token")),
    "config_added_negative": ("tokenizer_config.json", set_path({"-1": {"content": "x"}}, "added_tokens_decoder")),
    "config_added_huge": ("tokenizer_config.json", set_path({"9" * 40: {"content": "x"}}, "added_tokens_decoder")),
    "config_added_gap": ("tokenizer_config.json", set_path({"600": {"content": "<x>"}}, "added_tokens_decoder")),
    "config_added_moved": ("tokenizer_config.json", set_path({"5": {"content": "<s>"}}, "added_tokens_decoder")),
    "config_added_list": ("tokenizer_config.json", set_path([1], "added_tokens_decoder")),
    "config_added_word": ("tokenizer_config.json", set_path({"512": "x"}, "added_tokens_decoder")),
    "template_number": ("tokenizer_config.json", set_path(7, "chat_template")),
    "template_unnamed": ("tokenizer_config.json", set_path([{"template": "x"}], "chat_template")),
    "template_null": ("tokenizer_config.json", set_path([{"name": "x", "template": None}], "chat_template")),
    "template_large": ("tokenizer_config.json", set_path("x" * 300_000, "chat_template")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_field_is_one_error_that_names_the_file(name, stories_copy):
    file, change = BROKEN[name]
    edit(stories_copy, file, change)
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_folder(stories_copy)
    assert str(stories_copy / file) in str(caught.value)
    assert len(str(caught.value)) < 600


WHOLE_FILES = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "number": b"1",
    "bytes": bytes(range(256)),
    "utf16": '{"model": {}}'.encode("utf-16"),
    "deep": b'{"model":' + b"[" * 100_000,
    "unclosed": b'{"model": {"vocab": {"a": 0',
}


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("name", WHOLE_FILES)
def test_broken_file_is_one_error_that_names_it(name, file, stories_copy):
    (stories_copy / file).write_bytes(WHOLE_FILES[name])
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_folder(stories_copy)
    assert str(stories_copy / file) in str(caught.value)


def test_broken_chat_template_files(stories_copy):
    (stories_copy / "chat_template.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"chat_template\.json"):
        Tokenizer.from_folder(stories_copy)
    for content in (b"\xff\xfe", b"x" * 300_000):
        (stories_copy / "chat_template.jinja").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
            Tokenizer.from_folder(stories_copy)
    (stories_copy / "chat_template.jinja").unlink()
    (stories_copy / "chat_template.jinja").mkdir()
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        Tokenizer.from_folder(stories_copy)


def test_truncated_and_flipped_files_load_or_are_refused(stories_copy):
    """Nothing but ModelLoadError comes out, whatever byte is missing or wrong."""
    path = stories_copy / "tokenizer.json"
    whole = path.read_bytes()
    rng = random.Random(0)
    for cut in rng.sample(range(len(whole)), 60):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelLoadError):
            Tokenizer.from_folder(stories_copy)
    loaded = refused = 0
    for _ in range(300):
        broken = bytearray(whole)
        broken[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            tokenizer = Tokenizer.from_folder(stories_copy)
        except ModelLoadError as error:
            refused += 1
            assert str(path) in str(error)
        else:
            loaded += 1
            tokenizer.decode(tokenizer.encode("once upon a time"))
    assert loaded and refused


def test_a_panic_of_the_rust_library_ends_one_text(stories_copy):
    """Such a pattern fits the short text that is tried at load, and gives up on long ones."""
    stage = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    edit(stories_copy, "tokenizer.json", set_path(stage, "pre_tokenizer"))
    tokenizer = Tokenizer.from_folder(stories_copy)
    with pytest.raises(RequestError, match="this model's tokenizer fails on the text"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("one") == tokenizer.encode("one")
