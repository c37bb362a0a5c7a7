"""`ridgeline prune` and `ridgeline distill`: folders that run, their measurements, and what is refused."""

import json

import pytest


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_text("import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        yield name\n" * 20)
    return path


def pruning(text, out):
    return ("--text", text, "--out", out, "--length=32", "--samples=4", "--eval-tokens=200", "--num-threads=1")


def test_a_pruned_model_is_distilled_and_runs(ridgeline, text, tmp_path):
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    pruned, student = tmp_path / "pruned", tmp_path / "student"
    done = ridgeline("prune", "python-1m", "--params=600000", "--candidates=2", *pruning(text, pruned))
    assert done.code == 0, done.err
    assert f"ridgeline distill {pruned} --teacher python-1m" in done.out
    quality = json.loads((pruned / "ridgeline_quality.json").read_text())
    assert quality["method"]["method"] == "prune"
    assert 1 <= len(quality["method"]["candidates"]) <= 2
    done = ridgeline(
        *("distill", pruned, "--teacher=python-1m", "--text", text, "--tokens=2048", "--batch-tokens=256"),
        *("--eval-tokens=200", "--num-threads=1", "--out", student),
    )
    assert done.code == 0, done.err
    after = json.loads((student / "ridgeline_quality.json").read_text())
    assert after["method"]["teacher"] == "python-1m"
    card = (student / "README.md").read_text()
    assert f"**{after['comparison']['bits_per_byte']:.4f}**" in card
    assert f"{after['comparison']['kl']['mean']:.4f} ±" in card
    assert card.startswith("# student\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pruned", "student", "text.py"]
    done = ridgeline("generate", student, "def f(", "--max-tokens=4", "--temperature=0", "--num-threads=1")
    assert done.code == 0, done.err
    again = ridgeline("distill", pruned, "--teacher=python-1m", "--text", text, "--out", student)
    assert again.code == 2
    assert "exists already" in again.err


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("prune", [], "give either --params or --latency"),
        ("prune", ["--params=tiny"], "--params"),
        ("prune", ["--params=1000", "--length=32"], "a budget of 1,000 prunes nothing or cannot be met"),
        ("prune", ["--latency=1.5"], "latency must be"),
        ("prune", ["--params=1000000", "--axes=depths"], "'depths' is not one of 'both', 'width', 'depth'"),
        ("prune", ["--params=600000", "--eval-text", "{text}"], "is calibration text and held-out text"),
        ("distill", ["--teacher=nothing-here/at-all"], "nothing-here/at-all"),
        ("distill", ["--teacher=python-9m", "--tokens=0"], "tokens must be at least 1"),
        ("distill", ["--teacher=python-9m", "--temperature=0"], "temperature must be greater than 0"),
    ],
)
def test_wrong_options_are_told_in_a_line(ridgeline, text, tmp_path, command, arguments, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = [argument.format(text=text) for argument in arguments]
    done = ridgeline(command, "python-1m", "--text", text, "--out", tmp_path / "out", *own)
    assert done.code in (2, 3)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.py"]
