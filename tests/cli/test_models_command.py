"""`ridgeline models` and `ridgeline pull`, and which model a command takes that was given none."""

import json
import shutil
from pathlib import Path

import pytest

from ridgeline.cli import _options
from ridgeline.core.machine import cache_folder
from ridgeline.weights import catalog
from ridgeline.weights.fetch import PUBLISHED, SMOLLM2, PublishedModel, fetched

HERE = cache_folder()  # of the user, before tests move it


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """No hub cache, and nothing fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(catalog, "_in_hub_cache", lambda: iter(()))
    return tmp_path / "ridgeline" / "models"


@pytest.fixture
def tiny_gguf(cache, shared_data, monkeypatch):
    """A real GGUF file in the place of the fetched model."""
    source = shared_data / "models/stories260K/stories260K.gguf"
    model = PublishedModel(
        hub_id="a/b", revision="main", file="t.gguf", num_bytes=source.stat().st_size, sha256="", requirement="x==1"
    )
    monkeypatch.setitem(PUBLISHED, "smollm2", model)
    cache.mkdir(parents=True)
    shutil.copyfile(source, cache / "t.gguf")
    return cache / "t.gguf"


def test_the_list_has_the_bundled_models_and_says_what_is_missing(ridgeline):
    done = ridgeline("models")
    assert done.code == 0
    lines = done.out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("python-9m")]
    assert row == ["python-9m", "bundled", "17", "MB", "completion,", "embed", "1,024"]
    assert lines[-1] == "Not here yet: smollm2; fetch with: ridgeline pull smollm2"


def test_a_fetched_model_is_listed_and_is_the_default(ridgeline, tiny_gguf):
    entries = {entry["name"]: entry for entry in json.loads(ridgeline("models", "--json").out)}
    entry = entries["smollm2"]
    assert (entry["origin"], entry["path"], entry["context"]) == ("fetched", str(tiny_gguf), 128)
    assert entry["num_bytes"] == tiny_gguf.stat().st_size and entry["uses"] == ["completion", "embed"]
    assert "Not here yet" not in ridgeline("models").out
    assert _options.default_model() == _options.default_chat_model() == "smollm2"
    done = ridgeline("generate", "-p", "Once", "--max-tokens", 4, "--temperature", 0)
    assert done.code == 0 and done.out.startswith("Once upon")
    assert ridgeline("pull", "smollm2").out == f"smollm2 is in {tiny_gguf}; talk to it: ridgeline chat smollm2\n"


def test_a_broken_model_is_listed_with_its_problem(ridgeline, tiny_gguf):
    tiny_gguf.write_bytes(b"GGUF?")
    (entry,) = [entry for entry in json.loads(ridgeline("models", "--json").out) if entry["name"] == "smollm2"]
    assert entry["problem"] and entry["uses"] == []
    assert ridgeline("models").code == 0


def test_a_model_in_the_hub_cache_is_listed(ridgeline, model_folder, monkeypatch):
    monkeypatch.setattr(catalog, "_in_hub_cache", lambda: iter([("org/tiny", "hub cache", model_folder)]))
    (entry,) = [entry for entry in json.loads(ridgeline("models", "--json").out) if entry["name"] == "org/tiny"]
    assert entry["origin"] == "hub cache" and entry["context"] == 96


def test_chat_without_a_model_says_what_to_type(ridgeline):
    assert _options.default_model() == "python-9m"
    done = ridgeline("chat", stdin="hello\n")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("Fetch one (98 MB): ridgeline pull smollm2\n") and done.err.count("\n") == 1


def test_pull_refuses_what_it_cannot_honour(ridgeline):
    done = ridgeline("pull", "smollm2", "--revision", "main")
    assert done.code == 2 and "smollm2 has no revisions" in done.err
    done = ridgeline("pull", "no such model")
    assert done.code == 3 and "'no such model'" in done.err and done.err.count("\n") == 1


def test_smollm2_answers(ridgeline, monkeypatch):
    """The real model, where it has been fetched; every token up to the city leads by more than one nat."""
    path = HERE / "models" / SMOLLM2.file
    if not path.is_file():
        pytest.skip(f"SmolLM2-135M-Instruct is not in {path}; fetch it with: ridgeline pull smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(HERE.parent))
    assert fetched("smollm2") == path
    done = ridgeline("chat", "--quick", "Where is the Eiffel Tower?", "--temperature", 0, "--max-tokens", 24)
    assert done.code == 0, done.err
    assert "Paris" in done.out and "tokens/s" in done.err
    (entry,) = [entry for entry in json.loads(ridgeline("models", "--json").out) if entry["name"] == "smollm2"]
    assert entry["uses"] == ["chat", "completion", "embed"] and Path(entry["path"]) == path
