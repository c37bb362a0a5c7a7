"""The comparison as a user runs it: two engines and a broken one, on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

REPO = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.peers"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def run(*arguments):
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300, check=False)


def test_two_engines_in_turn(model, tmp_path):
    cells = ["start", "prefill_512", "decode_b4", "serve_16", "prefix_1024"]
    done = run(
        *("--model", model, "--transformers-python", sys.executable, "--cells", *cells),
        *("--shrink", 16, "--repetitions", 1, "--threads", 1, "--out", tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*/*-peers.json")
    report = json.loads(path.read_text())
    assert str(model.parent) not in path.read_text()
    own, peer = "ridgeline bf16", "transformers bf16"
    assert [run["system"] for run in report["runs"]] == [own, peer]
    assert all(list(run["values"]) == cells and run["error"] is None for run in report["runs"])
    assert all(run["read_bandwidth_gb_per_s"] > 0 and 0 <= run["steal_share"] <= 1 for run in report["runs"])
    assert [pair["cell"] for pair in report["comparisons"]] == cells
    for pair in report["comparisons"]:
        own_value, peer_value = (
            next(run["values"][pair["cell"]] for run in report["runs"] if run["system"] == name) for name in (own, peer)
        )
        expected = peer_value / own_value if pair["cell"] == "start" else own_value / peer_value
        assert pair["ratios"] == [pytest.approx(expected)]
    assert all(system["versions"]["torch"] for system in report["systems"])


def test_an_engine_that_fails_does_not_end_the_comparison(model, tmp_path):
    done = run(
        *("--model", model, "--llama-bin", tmp_path, "--gguf", 16, "absent", tmp_path / "absent.gguf"),
        *("--ridgeline", 16, "wrong", '{"dtype": "float7"}', "--cells", "start", "prefill_512"),
        *("--ridgeline", 8, "right", '{"dtype": "float32"}'),
        *("--shrink", 64, "--repetitions", 1, "--threads", 1, "--out", tmp_path),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = tmp_path.glob("*/*-peers.json")
    runs = {run["system"]: run for run in json.loads(path.read_text())["runs"]}
    assert "exit code" in runs["ridgeline wrong"]["error"]
    assert "float7" in done.stderr  # the engine's own words reach the person, not the result
    assert runs["llama.cpp absent"]["error"] == "cannot run llama-bench: No such file or directory"
    assert runs["ridgeline right"]["error"] is None
    assert set(runs["ridgeline right"]["values"]) == {
        "start",
        "prefill_512",
    }
