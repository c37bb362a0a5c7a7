"""Every fuzzer for a moment, the same inputs each time; `python -m tests.fuzz` goes on for as long as it is let."""

from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
from tests.fuzz.harness import Checked, Finding, Target, inputs
from tests.fuzz.parsers import PARSERS, opened

NUMBERS = {
    "template": 500,
    "quantized": 40,
    "grammar": 40,
    "options": 30,
    "bodies": 150,
    "http": 150,
    "config": 150,
    "tokenizer": 150,
}


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "quantized"])  # tests/weights has it
def test_any_bytes_are_a_value_or_one_typed_error(name: str, tmp_path: Path) -> None:
    with closing(opened(name, tmp_path)) as target:
        checked = Checked(target)
        for data in islice(inputs(target, 0), NUMBERS.get(name, 250)):
            checked(data)
    assert checked.seed_counts["taken"] and checked.counts["refused"]


WORDS = b"""{"model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
"max_input_chars_per_word": 100, "vocab": {"a": 0, "b": 1, "1": 2}}, "pre_tokenizer": {"type": "BertPreTokenizer"},
"version": "1.0", "added_tokens": []}"""
FOUND = {
    "azure": [
        lambda seed: seed.replace(b",374,", b"," + b"9" * 400 + b","),
        lambda seed: seed.replace(b"18:17:04,", b"18:17:04+01:00,"),
        lambda seed: seed.replace(b"374", b'"' + b"1" * 200_000),
    ],
    "grammar": [lambda seed: b'\0{"const": "\\ud800"}'],
    "journal": [lambda seed: seed.replace(b"first_hash", b"first_hush")],
    "keys": [lambda seed: b"a = " + b"[" * 5000],
    "mooncake": [
        lambda seed: seed.replace(b'h": 5,', b'h": ' + b"9" * 400 + b","),
        lambda seed: seed.replace(b"[0]", b'[0], "more": ' + b"[" * 5000),
    ],
    "options": [lambda seed: b"port = " + b"[" * 5000],
    "tokenizer": [lambda seed: WORDS + b"\0zz"],
    "pack": [lambda seed: b"\1" + seed[-300:].replace(b"a", b"\xff")],
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_one_typed_error(name: str, tmp_path: Path) -> None:
    with closing(opened(name, tmp_path)) as target:
        for change in FOUND[name]:
            changed = change(target.seeds[0])
            assert changed not in target.seeds and not target.run(changed)


@pytest.mark.parametrize("error", [KeyError("a"), SystemExit(1), BaseException("a panic")])
def test_any_other_error_is_a_finding(error: BaseException) -> None:
    def run(data: bytes) -> bool:
        if data != b"seed":
            raise error
        return True

    checked = Checked(Target(run, [b"seed"]))
    with pytest.raises(Finding, match=type(error).__name__):
        for data in inputs(checked.target, 0):
            checked(data)


def test_too_much_memory_is_a_finding() -> None:
    held = []

    def run(data: bytes) -> bool:
        if data != b"seed":
            held.append(b"x" * (128 << 20))
        return True

    checked = Checked(Target(run, [b"seed"]))
    with pytest.raises(Finding, match="more than 512 MiB"):
        for data in inputs(checked.target, 0):
            checked(data)
    assert len(held) < 10
