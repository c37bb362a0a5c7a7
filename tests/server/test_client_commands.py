"""Commands of others that talk to a server: llm, guidellm and lm-eval, each unmodified, in a process of its own.

They are looked for on PATH: they pin each other's versions, so each may have an environment. A test whose command is
not there skips, and says so in capitals. `docs/howto/clients.md` has the versions that were tried.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, new_engine, serving

PATIENCE_S = 300
SMALL = Path(__file__).resolve().parents[2] / "src/ridgeline/models/python-1m"
TEXT = "import os\nimport "


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    with serving(new_engine(SMALL)) as server:
        yield server
        server.assert_idle()


def run(folder: Path, command: str, package: str, *arguments: str, **more: str) -> str:
    """Run a command that is neither asked for a key nor may fetch anything; return what it prints."""
    beside = Path(sys.executable).parent
    path = shutil.which(command) or shutil.which(command, path=str(beside))
    if path is None:
        pytest.skip(f"NOT TESTED: {command}, for lack of it: pip install {package}, and put it on PATH")
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "unused", "DO_NOT_TRACK": "1"}
    environment = {**os.environ, **own, "NO_COLOR": "1", **more}
    done = subprocess.run(
        [path, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_llm(small: LiveServer, tmp_path: Path):
    about = {"model_id": "tiny", "model_name": "python-1m", "api_base": f"{small.url}/v1", "supports_schema": True}
    completes = {**about, "model_id": "tiny-text", "completion": True, "supports_schema": False}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([about, completes]))
    options = ("-o", "temperature", "0", "-o", "max_tokens", "8")
    body = {"temperature": 0, "max_tokens": 8}
    chat = small.post("chat/completions", messages=[{"role": "user", "content": TEXT}], **body).json()
    said = chat["choices"][0]["message"]["content"]
    for streams in ((), ("--no-stream",)):
        found = run(tmp_path, "llm", "llm", "-m", "tiny", TEXT, *options, *streams, LLM_USER_PATH=str(tmp_path))
        assert found.rstrip("\n") == said.rstrip("\n")
    found = run(tmp_path, "llm", "llm", "-m", "tiny-text", TEXT, *options, LLM_USER_PATH=str(tmp_path))
    assert found.rstrip("\n") == small.complete(prompt=TEXT, **body)["choices"][0]["text"].rstrip("\n")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked = ("--schema", json.dumps(schema), "-o", "max_tokens", "200")
    found = run(tmp_path, "llm", "llm", "-m", "tiny", TEXT, *asked, LLM_USER_PATH=str(tmp_path))
    assert isinstance(json.loads(found)["ok"], bool)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(small: LiveServer, tmp_path: Path, path: str):
    run(
        tmp_path,
        *("guidellm", "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={small.url},request_format={path}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={SMALL}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", f"kind=json,path={tmp_path}/report.json"),
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (6, 0)
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {8}


CHOICES = [("import os\nimport ", ["sys", "banana", "(((("]), ("def main(", ["):", " zebra", "%%"])]


def test_lm_eval(small: LiveServer, tmp_path: Path):
    """Choices by echo and log-probabilities, texts by generation: each figure is the one that the server gives us."""
    rows = [{"prompt": prompt, "choices": choices, "gold": 0} for prompt, choices in CHOICES]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": "",
    }
    chosen = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
    written = {"output_type": "generate_until", "doc_to_target": "x"}
    written |= {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0}}
    for name, own, metric in (("tiny_choice", chosen, "acc"), ("tiny_text", written, "exact_match")):
        (tmp_path / f"{name}.yaml").write_text(
            json.dumps({"task": name, **shared, **own, "metric_list": [{"metric": metric}]})
        )
    about = f"model=python-1m,base_url={small.url}/v1/completions,tokenizer={SMALL},num_concurrent=2,max_length=512"
    run(
        tmp_path,
        *("lm-eval", "lm-eval[api] transformers", "run", "--model", "local-completions", "--model_args", about),
        *("--tasks", "tiny_choice,tiny_text", "--include_path", str(tmp_path), "--output_path", "out", "--log_samples"),
    )

    def samples(name: str) -> list[dict]:
        (file,) = tmp_path.glob(f"out/**/samples_{name}_*.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    def ids(text: str) -> list[int]:
        return small.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]

    for sample in samples("tiny_choice"):
        for choice, ((logprob, _),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            prompt, whole = ids(sample["doc"]["prompt"].rstrip()), ids(sample["doc"]["prompt"] + choice)
            asked = [*prompt, *whole[len(prompt) :]]  # not the whole, where tokens meet across the border
            answer = small.complete(prompt=asked, echo=True, logprobs=1, max_tokens=1, temperature=0)
            expected = sum(answer["choices"][0]["logprobs"]["token_logprobs"][len(prompt) : len(asked)])
            assert float(logprob) == pytest.approx(expected, abs=1e-3), choice
    for sample in samples("tiny_text"):
        answer = small.complete(prompt=ids(sample["doc"]["prompt"]), max_tokens=8, temperature=0, stop=["\n\n"])
        assert sample["resps"][0][0] == answer["choices"][0]["text"]
