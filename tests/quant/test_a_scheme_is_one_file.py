"""A file in the folder of schemes is all that a scheme takes: names, checks, memory, both backends follow from it."""

import shutil

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core import config
from ridgeline.core.errors import ConfigError
from ridgeline.quant import schemes

INT5 = """
import numpy as np

from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import StoredFormat, StoredMatrix


def stored_format(group_size, zero_points):
    if zero_points or group_size not in (None, 64):
        raise ConfigError("int5 has groups of 64 and no zero points")
    return StoredFormat("uniform", 8, 64)


def quantize(weight_NK, form):
    num_outputs, num_inputs = weight_NK.shape
    groups = form.num_groups(num_inputs)
    w = np.pad(weight_NK, ((0, 0), (0, groups * 64 - num_inputs))).reshape(num_outputs, groups, 64)
    scales = (np.abs(w).max(axis=2) / 15).astype(np.float16).astype(np.float32)
    steps = np.rint(w / np.where(scales > 0, scales, np.inf)[:, :, None]) + 128
    return StoredMatrix(form, steps.astype(np.uint8).reshape(num_outputs, -1)[:, :num_inputs].copy(), scales)
"""


@pytest.fixture
def int5(tmp_path, monkeypatch):
    folder = tmp_path / "schemes"
    shutil.copytree(config.SCHEMES, folder)
    (folder / "int5.py").write_text(INT5)
    monkeypatch.setattr(config, "SCHEMES", folder)
    monkeypatch.setattr(schemes, "__path__", [str(folder)])


def completion(**options):
    llm = LLM("python-1m", dtype="float32", num_threads=1, **options)
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    return llm, llm.generate("def read_lines(path):", greedy, use_tqdm=False)[0].outputs[0]


def test_it_is_known_and_computes_on_both_backends(int5):
    assert config.scheme_names() == ["fp8", "int4", "int5", "int8", "mxfp4", "nf4", "nvfp4"]
    _, expected = completion(backend="reference", quantize="int5")
    _, plain = completion(backend="reference")
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    llm, found = completion(backend="native", quantize="int5")
    assert llm.engine.info.choices["quantize"].value == "int5, groups of 64"
    assert found.token_ids == expected.token_ids
    logprobs = [torch.tensor([entry.logprob for entry in output.logprobs]) for output in (found, expected, plain)]
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=2e-3)
    assert (logprobs[1] - logprobs[2]).abs().max() > 1e-2  # it does round


def test_its_options_are_its_own(int5):
    with pytest.raises(ConfigError, match="int5 has groups of 64"):
        LLM("python-1m", quantize="int5", quantize_group_size=32)


def test_without_the_file_it_is_unknown():
    with pytest.raises(ConfigError, match="quantize must be one of fp8, int4, int8, mxfp4, nf4, nvfp4, got 'int5'"):
        LLM("python-1m", quantize="int5")
