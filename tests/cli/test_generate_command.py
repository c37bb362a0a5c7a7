"""`ridgeline generate`: what is printed is what the Python API generates."""

import json

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.cli import _model
from ridgeline.engine.outputs import CompletionOutput
from ridgeline.engine.request import Timings

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def expected(model_folder):
    """Greedy continuations by the Python API."""
    llm = LLM(str(model_folder))

    def continuation(prompt, **params):
        return llm.generate(prompt, SamplingParams(temperature=0, **params), use_tqdm=False)[0].outputs[0]

    return continuation


def test_streams_prompt_and_continuation(ridgeline, model_folder, expected):
    done = ridgeline("generate", PROMPT, "-m", model_folder, "--temperature", 0, "--max-tokens", 20)
    assert done.code == 0
    assert done.out == PROMPT + expected(PROMPT, max_tokens=20).text + "\n"
    assert done.err.startswith("20 tokens in ") and done.err.count("\n") == 1
    assert "tokens/s" in done.err and "TTFT" in done.err and "TPOT" in done.err


def test_reads_standard_input(ridgeline, model_folder, expected):
    text = "import ös\n"
    done = ridgeline("generate", "-", "-m", model_folder, "--temperature", 0, "--max-tokens", 5, stdin=text)
    assert done.out == text + expected(text, max_tokens=5).text + "\n"


def test_default_prompt_is_python(ridgeline, model_folder):
    done = ridgeline("generate", "-m", model_folder, "--max-tokens", 3)
    assert done.out.startswith("def read_lines(path):")


def test_json_is_the_request_output(ridgeline, model_folder, expected):
    done = ridgeline("generate", PROMPT, "-m", model_folder, "--temperature", 0, "--max-tokens", 6, "--json")
    output = json.loads(done.out)
    (completion,) = output["outputs"]
    assert output["prompt"] == PROMPT
    assert completion["text"] == expected(PROMPT, max_tokens=6).text
    assert completion["token_ids"] == expected(PROMPT, max_tokens=6).token_ids
    assert completion["finish_reason"] == "length"
    assert output["usage"] == {
        "prompt_tokens": len(output["prompt_token_ids"]),
        "completion_tokens": 6,
        "cached_tokens": 0,
    }
    assert done.err == ""


def test_several_answers_are_printed_whole(ridgeline, model_folder):
    common = ["generate", PROMPT, "-m", model_folder, "--seed", 3, "--n", 3, "--max-tokens", 8]
    completions = json.loads(ridgeline(*common, "--json").out)["outputs"]
    done = ridgeline(*common)
    assert done.out == "".join(f"{PROMPT}{completion['text']}\n" for completion in completions)
    assert len({tuple(completion["token_ids"]) for completion in completions}) > 1
    assert "--- 3 of 3" in done.err and "24 tokens in" in done.err


def test_options_reach_the_sampler(ridgeline, model_folder, expected):
    common = ["generate", PROMPT, "-m", model_folder, "--max-tokens", 12]
    greedy = PROMPT + expected(PROMPT, max_tokens=12).text + "\n"
    for narrow in (["--top-k", 1], ["--top-p", 1e-6], ["--min-p", 1.0]):
        assert ridgeline(*common, "--temperature", 1, *narrow).out == greedy
    sampled = {seed: ridgeline(*common, "--temperature", 2, "--seed", seed).out for seed in (1, 2)}
    assert sampled[1] != sampled[2]
    assert ridgeline(*common, "--temperature", 2, "--seed", 1).out == sampled[1]


def test_stop_ends_the_answer_before_it(ridgeline, model_folder, expected):
    text = expected(PROMPT, max_tokens=20).text
    stop = text[8:10]
    done = ridgeline(
        "generate", PROMPT, "-m", model_folder, "--temperature", 0, "--max-tokens", 20, "--stop", stop, "--stop", "zzz"
    )
    assert done.out == PROMPT + text[: text.index(stop)] + "\n"


def test_dtype_and_context_reach_the_engine(ridgeline, model_folder, caplog):
    done = ridgeline("--verbose", "generate", "-m", model_folder, "--max-tokens", 1, "--dtype", "bfloat16")
    assert done.code == 0
    assert "dtype: bfloat16 (as asked)" in caplog.text
    done = ridgeline("generate", "-m", model_folder, "--max-tokens", 1, "--max-model-len", 4, "one two three four five")
    assert done.code == 2
    assert "maximum context length is 4 tokens" in done.err


def test_standard_input_must_be_utf8(ridgeline, model_folder):
    done = ridgeline("generate", "-", "-m", model_folder, stdin=b"\xff\xfe")
    assert (done.code, done.out) == (2, "")
    assert "not UTF-8" in done.err


def test_control_characters_stay_away_from_terminals(monkeypatch, capsys):
    hostile = "a\x1b]0;title\x07b\x9bc\td\r\n"
    _model.show(hostile)
    assert capsys.readouterr().out == hostile
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _model.show(hostile)
    assert capsys.readouterr().out == "a\ufffd]0;title\ufffdb\ufffdc\td\ufffd\n"


def test_summary_of_one_and_of_several_answers():
    def completion(num_tokens, ttft_s, tpot_s, latency_s):
        timings = Timings(queue_s=0.0, ttft_s=ttft_s, tpot_s=tpot_s, latency_s=latency_s, num_preemptions=0)
        return CompletionOutput(0, token_ids=[0] * num_tokens, timings=timings)

    one, two = completion(11, 0.02, 0.01, 0.5), completion(1, 0.03, None, 0.4)
    assert _model.summary([one]) == "11 tokens in 0.50 s · 22.0 tokens/s · TTFT 20 ms · TPOT 10.0 ms"
    assert _model.summary([two]) == "1 token in 0.40 s · 2.5 tokens/s · TTFT 30 ms"
    assert _model.summary([one, two]) == "12 tokens in 0.50 s · 24.0 tokens/s · TTFT 20 ms · TPOT 10.0 ms"
