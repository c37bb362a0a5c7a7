"""Quantized folders and files as formats of benchmarks, and the random folder that is written for them."""

import pytest
from benchmarks import decode_stream, random_folder
from benchmarks.common import model_of_format

from ridgeline import LLM, SamplingParams

SIZES = (
    "--hidden=128",
    "--inner=256",
    "--layers=2",
    "--heads=4",
    "--kv-heads=2",
    "--head-dim=32",
    "--vocab=1024",
    "--group=64",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "gptq"
    random_folder.main([str(path), *SIZES])
    return path


def test_a_random_folder_runs_as_it_is_stored(folder):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    llm = LLM(str(folder), num_threads=1)
    assert llm.engine.info.choices["quantize"].value == "as stored"
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert len(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids) == 4
    assert len(list(folder.glob("*.safetensors"))) == 5  # a layer each, embedding, head, norm


def test_a_format_is_a_name_or_a_path(folder):
    int16 = {"quantize_inputs": "int16"}
    assert model_of_format("int8", decode_stream.FORMATS, "m", int16) == ("m", decode_stream.FORMATS["int8"])
    assert model_of_format(str(folder), decode_stream.FORMATS, "m", int16) == (str(folder), {})
    assert model_of_format(f"{folder}:int16", decode_stream.FORMATS, "m", int16) == (str(folder), int16)
    with pytest.raises(SystemExit, match="is no folder"):
        model_of_format("int9", decode_stream.FORMATS, "m", int16)


def test_decode_of_a_folder_is_measured(folder, monkeypatch):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    monkeypatch.setattr(decode_stream, "stream_bytes_per_s", lambda threads: 1e9)
    run = decode_stream.measure("unused", f"{folder}:int16", 8, 1, 2, 1)
    weights = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)
    assert run.bytes_per_step > weights / 2 + 1024 * 128 * 2  # 4 bits, and the head in bfloat16
    assert run.bytes_per_step < weights / 2 * 1.5 + 1024 * 128 * 4


def test_a_random_folder_has_outliers(tmp_path):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    random_folder.main([str(tmp_path / "llm-int8"), "--format=llm-int8", *SIZES])
    llm = LLM(str(tmp_path / "llm-int8"), num_threads=1)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    choice = llm.engine.info.choices["quantize"]
    assert choice.value == "as stored" and choice.reason == "14 matrices keep the file's numbers"
