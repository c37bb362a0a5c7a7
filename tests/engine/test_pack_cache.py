"""The second start of a native engine takes its weights from the pack of the first, and computes the same."""

import shutil

import pytest
import torch

from packs_written import wait_for_packs
from ridgeline import LLM, SamplingParams
from ridgeline.backends.native import backend

pytest.importorskip("ridgeline._native", reason="the native code is not built")

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1)


@pytest.fixture
def model(shared_data, tmp_path, monkeypatch):
    """A model folder of its own, an empty cache folder, and no model too small to be cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backend, "MIN_PACK_BYTES", 0)
    return shutil.copytree(shared_data / "models" / "stories260K", tmp_path / "model")


def start(model, monkeypatch, **options):
    """(logprobs of an output, whether the checkpoint was read)"""
    reads = []
    with monkeypatch.context() as patch:
        real = backend.StreamedWeights
        patch.setattr(backend, "StreamedWeights", lambda *given: reads.append(1) or real(*given))
        llm = LLM(str(model), backend="native", num_threads=2, max_model_len=64, **options)
    (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    wait_for_packs()
    return torch.tensor([entry.logprob for entry in output.outputs[0].logprobs]), bool(reads)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"quantize": "int8"},
        {"quantize": "int4", "quantize_group_size": 32},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_second_start_reads_the_pack(model, monkeypatch, options):
    first, read_first = start(model, monkeypatch, **options)
    second, read_second = start(model, monkeypatch, **options)
    assert (read_first, read_second) == (True, False)
    assert torch.equal(first, second)
    without, read = start(model, monkeypatch, pack_cache=False, **options)
    assert read and torch.equal(first, without)


def test_files_are_read_ahead_where_no_pack_is_found(model, monkeypatch):
    asked = []
    monkeypatch.setattr(backend, "read_ahead", lambda files: asked.append([file.name for file in files]))
    for _ in range(2):
        start(model, monkeypatch)
    assert asked == [["model.safetensors"]]
    start(model, monkeypatch, pack_cache=False)
    monkeypatch.setattr(backend, "AHEAD_SHARE", 1e-9)
    start(model, monkeypatch, pack_cache=False)
    assert len(asked) == 2


def test_a_damaged_pack_or_another_setting_reads_the_checkpoint(model, monkeypatch, tmp_path, caplog):
    start(model, monkeypatch, quantize="int8")
    assert start(model, monkeypatch, quantize="int4", quantize_group_size=64)[1]
    for pack in (tmp_path / "cache" / "ridgeline" / "packs").iterdir():
        raw = bytearray(pack.read_bytes())
        raw[5000] ^= 1
        pack.write_bytes(raw)
    assert start(model, monkeypatch, quantize="int8")[1]
    assert "damaged" in caplog.text


def test_an_unusable_cache_folder_costs_only_the_cache(model, monkeypatch, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    assert start(model, monkeypatch)[1]
    assert "could not be cached" in caplog.text
