"""llm: a chat and a completion model of `extra-openai-models.yaml`, streamed and not, with schemas and tools."""

import json
import os
from pathlib import Path

from driving import GREEDY, MODEL, PAIR, TEXT, URL, check, command, is_pair, post, run_checks, said

ABOUT = {
    "model_id": "ours",
    "model_name": MODEL,
    "api_base": f"{URL}/v1",
    "supports_schema": True,
    "supports_tools": True,
}
COMPLETES = {"model_id": "ours-text", "model_name": MODEL, "api_base": f"{URL}/v1", "completion": True}
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(json.dumps([ABOUT, COMPLETES]))
OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", "8")


@check
def chat():
    for streams in ((), ("--no-stream",)):
        found = command("llm", "-m", "ours", TEXT, *OPTIONS, *streams)
        assert found.rstrip("\n") == said().rstrip("\n"), streams
    return found


@check
def usage():
    command("llm", "-m", "ours", TEXT, *OPTIONS)
    (last,) = json.loads(command("llm", "logs", "-n", "1", "--json"))
    assert last["output_tokens"] == 8 and last["input_tokens"] > 0, last
    return last["input_tokens"]


@check
def conversation_goes_on():
    return command("llm", "-c", "import sys", *OPTIONS)


@check
def completions():
    expected = post("v1/completions", prompt=TEXT, **GREEDY)["choices"][0]["text"]
    assert command("llm", "-m", "ours-text", TEXT, *OPTIONS).rstrip("\n") == expected.rstrip("\n")
    return expected


@check
def schema():
    asked = ("--schema", json.dumps(PAIR), "-o", "max_tokens", "200", "-o", "seed", "3")
    for streams in ((), ("--no-stream",)):
        found = command("llm", "-m", "ours", TEXT, *asked, *streams)
        assert is_pair(json.loads(found)), found
    return found


@check
def tools():
    tool = "def pair(ok: bool) -> str:\n    'A pair.'\n    return 'done'\n"
    return command("llm", "-m", "ours", TEXT, "--functions", tool, *OPTIONS)


@check
def models():
    return command("llm", "models", "list", "-q", "ours")


run_checks("llm")
