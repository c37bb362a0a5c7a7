"""Every fuzzer for a moment, the same inputs each time; `python -m tests.fuzz` goes on for as long as it is let."""

from itertools import islice
from pathlib import Path

import pytest
from tests.fuzz.harness import Checked, Finding, Target, inputs
from tests.fuzz.parsers import PARSERS, opened

NUMBERS = {"quantized": 40, "grammar": 40, "options": 30, "bodies": 150, "http": 150, "config": 150, "tokenizer": 150}


@pytest.mark.parametrize("name", PARSERS)
def test_any_bytes_are_a_value_or_one_typed_error(name: str, tmp_path: Path) -> None:
    checked = Checked(opened(name, tmp_path))
    for data in islice(inputs(checked.target, 0), NUMBERS.get(name, 250)):
        checked(data)
    assert checked.seed_counts["taken"] and checked.counts["refused"]


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
