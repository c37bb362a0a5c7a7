"""The files of a batch alone: any end of the process leaves whole lines, and what is done is known by name."""

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import ConfigError
from ridgeline.server.batch.journal import Journal
from ridgeline.server.batch.lines import DUPLICATE, Line, LineResponse, Problem, Result, Work

MAX_BYTES = 200


def line(name: str, **fields: object) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"a": 1}} | fields)


def work_of(folder: Path, *lines: str, url: str | None = None) -> Work:
    path = folder / "in.jsonl"
    path.write_text("".join(f"{each}\n" for each in lines))
    return Work.read(path, MAX_BYTES, url)


def result(name: str, status: int = 200) -> Result:
    response = LineResponse(status_code=status, request_id="r", body=msgspec.Raw(b'{"x":1}'))
    return Result(custom_id=name, response=response)


def add(journal: Journal, *results: Result) -> None:
    async def all_at_once():
        await asyncio.gather(*map(journal.add, results))

    asyncio.run(all_at_once())


def test_lines_are_numbered_and_bad_ones_say_why(tmp_path: Path):
    work = work_of(
        tmp_path,
        line("a"),
        "",
        "{",
        line("b", method="GET"),
        line("c", url="/v1/files"),
        line("d", body=[1]),
        line("e", body={"stream": True}),
        line("f" * MAX_BYTES),
        line("g", custom_id=""),
        json.dumps({"custom_id": "h"}),
        line("ü"),
    )
    assert [problem.line for problem in work.problems] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert all(problem.message.startswith(f"line {problem.line}: ") for problem in work.problems)
    assert {problem.code for problem in work.problems} == {"invalid_json_line", "invalid_request", "line_too_long"}
    left = list(work.left())
    assert [index for index, _ in left] == [0, 2, 3, 4, 5, 6, 7, 8, 9, 10] and work.num_left == len(left)
    assert [each.custom_id for _, each in left if isinstance(each, Line)] == ["a", "ü"]
    assert not work.duplicates


def test_duplicates_are_found_with_both_lines(tmp_path: Path):
    work = work_of(tmp_path, line("a"), line("b"), line("a"), "", line("b"), line("b"))
    assert [(each.code, each.line) for each in work.duplicates] == [(DUPLICATE, 3), (DUPLICATE, 5), (DUPLICATE, 6)]
    assert work.duplicates[0].message == "line 3 has the custom_id of line 1"


def test_a_line_for_another_endpoint_than_the_batch_is_a_problem(tmp_path: Path):
    work = work_of(tmp_path, line("a"), line("b", url="/v1/embeddings"), url="/v1/completions")
    assert [(each.code, each.line) for each in work.problems] == [("mismatched_url", 2)]


@given(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=12), st.data())
def test_after_a_cut_at_any_byte_each_line_is_there_once(tmp_path_factory: pytest.TempPathFactory, names, data):
    folder = tmp_path_factory.mktemp("cut")
    lines = [line(name) if i % 3 else "{" for i, name in enumerate(names)]  # every third is none
    results = [
        result(name) if i % 3 else Result(custom_id=None, error=Problem(code="c", message="m", line=i + 1))
        for i, name in enumerate(names)
    ]
    path = folder / "out.jsonl"
    journal = Journal(path)
    add(journal, *results)
    journal.close()
    whole = path.read_bytes()
    assert sorted(whole.splitlines()) == sorted(map(msgspec.json.encode, results))
    os.truncate(path, data.draw(st.integers(0, len(whole))))

    work = work_of(folder, *lines)
    journal = Journal(path)
    kept = len(journal.keys)
    assert work.skip(journal.keys) and work.num_left == len(names) - kept
    by_key = {each.key: each for each in results}
    add(journal, *(by_key[int(work.keys_N[index])] for index, _ in work.left()))
    journal.close()
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_counts_of_what_was_there(tmp_path: Path):
    journal = Journal(tmp_path / "out")
    add(journal, result("a"), result("b", 400), result("c"))
    journal.close()
    again = Journal(tmp_path / "out")
    assert (len(again.keys), again.num_ok) == (3, 2)
    again.close()


def test_two_processes_do_not_write_one_file(tmp_path: Path):
    journal = Journal(tmp_path / "out")
    with pytest.raises(ConfigError, match="another process"):
        Journal(tmp_path / "out")
    journal.close()


def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path):
    (tmp_path / "out").write_text("my notes\nunfinished")
    with pytest.raises(ConfigError, match="line 1, is no result"):
        Journal(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "my notes\nunfinished"


def test_a_full_disk_leaves_no_half_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    journal = Journal(tmp_path / "out")
    add(journal, result("a"))
    write, room = os.write, [10]

    def until_full(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        room[0] -= (written := write(descriptor, data[: room[0]]))
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", until_full)
        with pytest.raises(OSError, match="No space"):
            add(journal, result("b"))
        assert (tmp_path / "out").read_bytes().count(b"\n") == 1
        assert (tmp_path / "out").read_bytes().endswith(b"\n")
    add(journal, result("c"))  # there is room again
    journal.close()
    names = [json.loads(each)["custom_id"] for each in (tmp_path / "out").read_text().splitlines()]
    assert names == ["a", "b", "c"]
