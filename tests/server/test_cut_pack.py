"""A pack that another program cuts off while it is served: no process dies of it, and no wrong token is told."""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from live_server import LiveServer, eventually, serving
from transformers import LlamaConfig, LlamaForCausalLM

from packs_written import wait_for_packs
from ridgeline.backends.native import backend
from ridgeline.core.config import EngineConfig
from ridgeline.engine.llm import LLM
from ridgeline.engine.process.client import ProcessEngine

pytest.importorskip("ridgeline._native", reason="the native code is not built")

OPTIONS = {"backend": "native", "dtype": "float32", "num_threads": 2, "deterministic": True}
PROMPTS = [[3, 5, 7 + i] for i in range(4)]
LARGE = {"vocab_size": 6000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
PATIENCE_S = 60.0
LOCAL = """
import sys
from ridgeline.backends.native import backend
from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import WeightsLostError
backend.MIN_PACK_BYTES = 0
pack, keep = sys.argv[2], int(sys.argv[3])
def load():
    return LLM(sys.argv[1], backend="native", dtype="float32", num_threads=2, deterministic=True)
greedy = SamplingParams(temperature=0, max_tokens=40)
def texts(llm):
    return [each.outputs[0].token_ids for each in llm.generate(["Once upon", "The dog"], greedy, use_tqdm=False)]
llm = load()
right = texts(llm)
with open(pack, "rb+") as file:
    file.truncate(keep)
for _ in range(2):
    try:
        texts(llm)
    except WeightsLostError as error:
        print(error)
assert texts(load()) == right
"""


@pytest.fixture
def packed(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A model, and the pack that its first start has left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backend, "MIN_PACK_BYTES", 0)
    model = str(shared_data / "models/stories260K")
    LLM(model, **OPTIONS)  # writes it behind its start
    return model, pack_below(tmp_path)


def pack_below(folder: Path) -> Path:
    wait_for_packs()
    (pack,) = (folder / "cache/ridgeline/packs").glob("*.pack")
    return pack


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5001, 0.99999])
def test_a_program_gets_one_error_and_may_load_again(packed: tuple[str, Path], share: float):
    model, pack = packed
    keep = int(pack.stat().st_size * share)
    command = [sys.executable, "-c", textwrap.dedent(LOCAL), model, str(pack), str(keep)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("cut off while it was in use") == 2


def tokens_of(live: LiveServer, prompt: list[int], num_tokens: int) -> tuple[list[int], bool]:
    """The tokens of a stream, and whether it came to its end."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True, "return_token_ids": True}
    answer = httpx.post(f"{live.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=PATIENCE_S)
    if answer.status_code == 503:
        return [], False
    assert answer.status_code == 200, answer.text
    events = [event for event in answer.text.split("\n\n") if event.startswith("data: {")]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    found = [token for chunk in chunks if "error" not in chunk for token in chunk["choices"][0]["token_ids"] or ()]
    return found, "[DONE]" in answer.text and "error" not in chunks[-1]


def test_a_server_goes_on_and_tells_no_wrong_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(**LARGE, **heads)).save_pretrained(tmp_path / "model")
    config = EngineConfig.of(str(tmp_path / "model"), **OPTIONS)
    LLM.from_config(config)  # packs, for the engine to map
    pack = pack_below(tmp_path)
    with serving(ProcessEngine(config), shutdown_timeout_s=0.0) as live, ThreadPoolExecutor(len(PROMPTS)) as clients:
        right = [tokens_of(live, prompt, 60) for prompt in PROMPTS]
        assert all(len(tokens) == 60 and ended for tokens, ended in right)
        first = live.engine.process_id
        under_way = [clients.submit(tokens_of, live, prompt, 3000) for prompt in PROMPTS]
        eventually(lambda: live.engine.stats().num_running == len(PROMPTS))
        os.truncate(pack, pack.stat().st_size // 2)
        for ending, (expected, _) in zip(under_way, right):
            tokens, ended = ending.result()
            assert not ended and tokens[:60] == expected[: len(tokens)]
            assert live.client.get("/health").status_code == 200
        eventually(lambda: live.client.get("/ready").status_code == 200)
        assert live.engine.process_id not in (None, first)
        assert [tokens_of(live, prompt, 60) for prompt in PROMPTS] == right
        assert live.engine.stats().num_restarts == 1
