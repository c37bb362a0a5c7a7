"""Weights replaced between batches: what comes then is what a fresh engine on the same weights computes, bit by bit."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ConfigError, ModelLoadError, RequestError

PROMPTS = ["Once upon a time there was a little girl named Lily", "The big dog ran to the", "One day"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1)
OPTIONS = {"dtype": "float32", "num_threads": 1, "deterministic": True, "block_size": 4}


@pytest.fixture(scope="module")
def source(shared_data: Path) -> Path:
    return shared_data / "models/stories260K"


@pytest.fixture(params=["native", "reference"])
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    """The reference backend has no deterministic mode: its batches are the same here, and one thread adds."""
    return {**OPTIONS, "backend": request.param, "deterministic": request.param == "native"}


@pytest.fixture
def llm(source: Path, options: dict[str, object]) -> LLM:
    return LLM(str(source), **options)


def changed(source: Path, round: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(round)
    return {
        name: (tensor + 0.05 * rng.standard_normal(tensor.shape)).astype(np.float32)
        for name, tensor in load_file(source / "model.safetensors").items()
    }


def with_weights(source: Path, tensors: dict[str, np.ndarray], folder: Path) -> str:
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def outputs_of(llm: LLM) -> list[object]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(each.prompt_logprobs, each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def test_three_rounds_from_folders_and_tensors(llm: LLM, source: Path, options: dict[str, object], tmp_path: Path):
    seen = [outputs_of(llm)]
    assert outputs_of(llm) == seen[0], "now from cached prefixes"
    for round in range(3):
        tensors = changed(source, round)
        folder = with_weights(source, tensors, tmp_path / f"round-{round}")
        llm.update_weights(tensors if round % 2 else folder)
        seen.append(outputs_of(llm))
        assert seen[-1] == outputs_of(LLM(folder, **options)), "as a fresh engine, without a prefix of older weights"
    assert all(seen[i] != seen[i + 1] for i in range(3))
    llm.update_weights(str(source))
    assert outputs_of(llm) == seen[0]


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"dtype": "bfloat16", "kv_dtype": "int8"}], ids=str)
def test_other_types_of_weights_are_packed_anew(source: Path, options: dict[str, object], tmp_path: Path):
    llm, folder = LLM(str(source), **{**OPTIONS, **options}), with_weights(source, changed(source, 7), tmp_path / "new")
    before = outputs_of(llm)
    llm.update_weights(folder)
    assert before != outputs_of(llm) == outputs_of(LLM(folder, **{**OPTIONS, **options}))


MEASURED = """
import sys
from pathlib import Path
from ridgeline import LLM, SamplingParams

def of(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

options = {"backend": sys.argv[3], "dtype": "float32", "num_threads": 1, "max_model_len": 64, "pack_cache": False}
llm = LLM(sys.argv[1], kv_cache_bytes=1 << 22, **options)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = of("VmRSS")
llm.update_weights(sys.argv[2])
print((of("VmHWM") - before) / llm.engine.info.weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is asked of Linux")
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_memory_never_has_both(tmp_path: Path, backend: str):
    """Weights of 100 MB in float32, stored as bfloat16: two of them would be a whole more than one."""
    torch.manual_seed(0)
    shape = {"vocab_size": 2000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
    folders = [str(tmp_path / name) for name in ("old", "new")]
    for folder in folders:
        LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(folder)
    command = [sys.executable, "-c", MEASURED, *folders, backend]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 0.8, "beyond one set of weights there are pages of the file, and the matrix at hand"


def test_unseeded_requests_do_not_repeat_their_seeds(llm: LLM, source: Path):
    params = SamplingParams(temperature=1.0, max_tokens=24)
    first = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
    llm.update_weights(str(source))
    assert llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids != first


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(llm: LLM, source: Path):
    before, tensors = outputs_of(llm), changed(source, 0)
    name = next(name for name in tensors if "mlp" in name)
    broken = {**tensors, name: tensors[name].copy()}
    broken[name][-1, -1] = np.nan
    wrong = [
        (broken, ModelLoadError, name),
        ({key: value for key, value in tensors.items() if key != name}, ModelLoadError, name),
        ({**tensors, name: tensors[name][:-1]}, ModelLoadError, name),
        ("python-1m", ConfigError, "another model"),
        ("no-such-model", ModelLoadError, "no-such-model"),
    ]
    for weights, error, words in wrong:
        with pytest.raises(error, match=words):
            llm.update_weights(weights)
        assert outputs_of(llm) == before


def test_outputs_under_way_are_not_mixed(llm: LLM, source: Path):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="under way"):
        llm.update_weights(str(source))
    stream.close()
    llm.update_weights(str(source))
