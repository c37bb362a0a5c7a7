"""`ridgeline batch`: every line of a file is answered once, whatever stops it on the way."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams

PATIENCE_S = 120.0
COMPLETION = {"method": "POST", "url": "/v1/completions"}


def write_lines(path: Path, *lines: dict | str) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def completion(name: str, prompt: str = "def", **body: object) -> dict:
    return {"custom_id": name, **COMPLETION, "body": {"prompt": prompt, "max_tokens": 4, "temperature": 0, **body}}


def read_results(path: Path) -> dict[str | None, dict]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = {each["custom_id"]: each for each in results}
    assert len(by_name) == len(results), "a line is there twice"
    return by_name


def text_of(result: dict) -> str:
    return result["response"]["body"]["choices"][0]["text"]


def test_answers_are_those_of_python(ridgeline, model_folder, tmp_path):
    prompts = ["def add(a", "import os", "print("]
    lines = [completion(f"line {i}", prompt, max_tokens=9) for i, prompt in enumerate(prompts)]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    lines.append({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    source, output = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    options = "--dtype", "float32", "--deterministic"
    ran = ridgeline("batch", source, output, "--model", model_folder, *options, "--chat-template", template)
    assert ran.code == 0 and "4 succeeded, 0 failed" in ran.out, ran.err
    results = read_results(output)
    llm = LLM(str(model_folder), dtype="float32", deterministic=True)
    greedy = SamplingParams(temperature=0, max_tokens=9)
    expected = llm.generate(prompts, greedy, use_tqdm=False)
    assert [text_of(results[f"line {i}"]) for i in range(3)] == [output.outputs[0].text for output in expected]
    result = results["chat"]
    assert result["id"].startswith("batch_req_") and result["error"] is None
    assert result["response"]["status_code"] == 200 and result["response"]["request_id"].startswith("req-")
    assert result["response"]["body"]["object"] == "chat.completion"


def test_bad_lines_are_error_lines_and_are_not_tried_again(ridgeline, model_folder, tmp_path):
    lines = [completion("good"), "{", completion("bad value", temperature=-1), "", completion("nobody", model="x")]
    lines += [completion("stream", stream=True), completion("far") | {"url": "/v1/files"}]
    source, output = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    for _ in range(2):
        ran = ridgeline("batch", model_folder, source, output)
        assert ran.code == 1 and "1 succeeded, 5 failed" in ran.out, ran.err
        results = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(results) == 6
        errors = [each["error"] for each in results if each["response"] is None]
        assert sorted(error["line"] for error in errors) == [2, 6, 7]
        answers = {each["custom_id"]: each["response"] for each in results if each["response"]}
        assert {name: each["status_code"] for name, each in answers.items()} == {
            "good": 200,
            "bad value": 400,
            "nobody": 404,
        }
        assert answers["bad value"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["MODEL", "IN"], "ridgeline batch MODEL IN OUT"),
        (["MODEL", "missing.jsonl", "OUT"], "missing.jsonl: No such file"),
        (["MODEL", "TWICE", "OUT"], "line 3 has the custom_id of line 1"),
        (["MODEL", "OTHER", "DONE"], "has results of other requests"),
        (["MODEL", "IN", "IN"], "line 1, is no result"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_the_model_is_loaded(ridgeline, tmp_path, arguments, words):
    result = {
        "id": "b",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {}},
        "error": None,
    }
    paths = {
        "IN": write_lines(tmp_path / "in", completion("a")),
        "TWICE": write_lines(tmp_path / "twice", completion("a"), completion("b"), completion("a")),
        "OTHER": write_lines(tmp_path / "other", completion("b")),
        "DONE": write_lines(tmp_path / "done", result),
        "OUT": tmp_path / "out",
        "MODEL": tmp_path / "no-model",
    }
    ran = ridgeline("batch", *(paths.get(each, each) for each in arguments))
    assert ran.code == 2 and words in ran.err, ran.err


def start(*arguments: object) -> subprocess.Popen:
    code = "from ridgeline.cli import main; main()"
    command = [sys.executable, "-c", code, "batch", *map(str, arguments), "--dtype", "float32", "--deterministic"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def eventually(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_kill_9_loses_no_line_and_repeats_none(ridgeline, model_folder, tmp_path):
    """Lines are sampled, so what comes of one must not depend on when it ran."""
    count, rng = 300, random.Random(0)
    lines = [completion(f"{i}", "def " * (1 + i % 5), max_tokens=1 + i % 40, temperature=1.0) for i in range(count)]
    source, output = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    options = "--max-num-seqs", 4
    for least in sorted(rng.sample(range(count // 2), 2)):
        with start(model_folder, source, output, *options) as process:
            eventually(lambda: output.exists() and output.read_bytes().count(b"\n") > least, process)  # noqa: B023
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert least < output.read_bytes().count(b"\n") < count, "it was killed on the way"
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_id":"29')
    for target in (output, tmp_path / "at-once.jsonl"):
        ran = ridgeline("batch", model_folder, source, target, *options, "--dtype", "float32", "--deterministic")
        assert ran.code == 0, ran.err
    killed, whole = read_results(output), read_results(tmp_path / "at-once.jsonl")
    assert killed.keys() == whole.keys() == {f"{i}" for i in range(count)}
    assert {name: text_of(each) for name, each in killed.items()} == {
        name: text_of(each) for name, each in whole.items()
    }


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({"max_tokens": 5}, (), "another body, or with other options: line 2 of"),
        ({}, ("--seed", 3), "line 1 and 1 more of"),
        ({}, ("--quantize", "int8"), "line 1 and 1 more of"),
        ({}, ("--max-num-seqs", 2, "--num-threads", 1), None),
    ],
)
def test_what_a_run_goes_on_with_must_be_what_it_began_with(ridgeline, model_folder, tmp_path, changes, more, words):
    output, third = tmp_path / "out.jsonl", completion("c")
    first = write_lines(tmp_path / "first.jsonl", completion("a"), completion("b"))
    assert ridgeline("batch", model_folder, first, output).code == 0
    second = write_lines(tmp_path / "second.jsonl", completion("a"), completion("b", **changes), third)
    before = output.read_bytes()
    ran = ridgeline("batch", model_folder, second, output, *more)
    if words is None:
        assert ran.code == 0 and output.read_bytes().startswith(before) and len(read_results(output)) == 3, ran.err
    else:
        assert ran.code == 2 and words in ran.err and output.read_bytes() == before, ran.err
        assert ran.err.strip().count("\n") <= 2, "one line, as it is wrapped"


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Twenty thousand lines with bodies of 1 KB: in memory is what their names take."""
    import tracemalloc

    from ridgeline.server.batch.lines import Work

    body = json.dumps({"prompt": "x" * 1000})
    with (tmp_path / "in").open("w") as file:
        for i in range(20_000):
            file.write(f'{{"custom_id":"{i}","method":"POST","url":"/v1/completions","body":{body}}}\n')
    tracemalloc.start()
    work = Work.read(tmp_path / "in", 2**20)
    left = sum(1 for _ in work.left())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left == 20_000 and peak_bytes < 3_000_000, "less than a seventh of the file"
