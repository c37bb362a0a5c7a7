"""What a start imports before the first token: nothing that only a server, a client, a chat or the reference needs."""

import subprocess
import sys

import pytest

NOT_BEFORE_THE_FIRST_TOKEN = {
    "asyncio",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "prometheus_client",
    "rich",
    "starlette",
    "torch",
    "typer",
    "uvicorn",
    "ridgeline.backends.reference.paged",
    "ridgeline.bench",
    "ridgeline.cli",
    "ridgeline.compress",
    "ridgeline.server",
    "ridgeline.text.chat",
    "ridgeline.text.gguf",
    "ridgeline.weights.fetch",
    "ridgeline.weights.gguf.model",
}
PROGRAM = """
import sys
from ridgeline import LLM, SamplingParams
llm = LLM("python-1m", num_threads=1)
params = SamplingParams(max_tokens=1, repetition_penalty=1.1, seed=1)
assert llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].token_ids
print(*sorted(sys.modules), sep="\\n")
"""


@pytest.fixture(scope="module")
def imported():
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_only_what_every_start_needs_is_imported(imported):
    assert {"ridgeline.engine.llm", "numpy", "tokenizers"} <= imported
    assert imported & NOT_BEFORE_THE_FIRST_TOKEN == set()


def test_one_family_is_imported(imported):
    """That of the model, here llama; others only where it is made of them."""
    families = {name for name in imported if name.startswith("ridgeline.spec.families.")}
    assert families == {"ridgeline.spec.families.llama"}
