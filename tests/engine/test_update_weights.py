"""Weights replaced between batches: what comes then is what a fresh engine on the same weights computes, bit by bit."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ConfigError, ModelLoadError, RequestError

PROMPTS = ["Once upon a time there was a little girl named Lily", "The big dog ran to the", "One day"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1)
OPTIONS = {"dtype": "float32", "num_threads": 1, "deterministic": True, "block_size": 4}


@pytest.fixture(scope="module")
def source(shared_data: Path) -> Path:
    return shared_data / "models/stories260K"


@pytest.fixture
def llm(source: Path) -> LLM:
    return LLM(str(source), **OPTIONS)


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


def test_three_rounds_from_folders_and_tensors(llm: LLM, source: Path, tmp_path: Path):
    seen = [outputs_of(llm)]
    assert outputs_of(llm) == seen[0], "now from cached prefixes"
    for round in range(3):
        tensors = changed(source, round)
        folder = with_weights(source, tensors, tmp_path / f"round-{round}")
        llm.update_weights(tensors if round % 2 else folder)
        seen.append(outputs_of(llm))
        assert seen[-1] == outputs_of(LLM(folder, **OPTIONS)), "as a fresh engine, without a prefix of older weights"
    assert all(seen[i] != seen[i + 1] for i in range(3))
    llm.update_weights(str(source))
    assert outputs_of(llm) == seen[0]


def test_unseeded_requests_do_not_repeat_their_seeds(llm: LLM, source: Path):
    params = SamplingParams(temperature=1.0, max_tokens=24)
    first = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
    llm.update_weights(str(source))
    assert llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids != first


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(llm: LLM, source: Path):
    before, tensors = outputs_of(llm), changed(source, 0)
    name = next(name for name in tensors if "mlp" in name)
    wrong = [
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
