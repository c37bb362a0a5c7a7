"""`ridgeline quantize` by methods with a folder of another kind: HQQ's, and ordinary ones with zeros."""

import numpy as np
import pytest
import torch
from test_quantize import CONFIGS, folder_of, quantized

from ridgeline.compress import methods
from ridgeline.compress.calibrate import statistics_of
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import wanda
from ridgeline.compress.recipe import Recipe
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.quant.stored import dequantize
from ridgeline.spec.families import read_spec
from ridgeline.weights.load import load_weights


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_moe"])
def test_two_of_four_weights_are_zero_in_an_ordinary_folder(tmp_path, name, method):
    folder = folder_of(tmp_path / "in", CONFIGS[name])
    job, made = quantized(folder, tmp_path / "out", method=method)
    assert "quantization_config" not in made.config and not job.left_out
    spec = read_spec(made.config)
    found = load_weights(made, spec, lower(spec), FLOAT32)
    plain = load_weights(folder, spec, lower(spec), FLOAT32)
    for weight in {each.name.partition("[")[0] for each in job.reports}:
        zeros = (found[weight].reshape(-1, 4) == 0).sum(1)
        assert (zeros >= 2).all() and (zeros == 2).mean() > 0.99, weight
    assert np.array_equal(found["embed.weight"], plain["embed.weight"])
    assert all(each.bits == 16 for each in job.reports)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_zeros_are_chosen_by_what_inputs_are(method):
    """Every other input is 8 times as large, so magnitudes choose wrongly; what is correlated makes up for zeros."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(32, 256, generator=generator)
    mixing_KK = torch.eye(256) + 0.2 * torch.randn(256, 256, generator=generator)
    x_TK = torch.randn(900, 256, generator=generator) @ mixing_KK
    x_TK[:, ::2] *= 8
    statistics = statistics_of([x_TK])
    made = methods.load(method).quantize(weight_NK, statistics, Grid(Recipe(method=method).form(), torch.float32))
    assert ((made.reshape(-1, 4) == 0).sum(1) == 2).all()
    by_magnitude = statistics.loss(wanda.by_magnitude(weight_NK) - weight_NK)
    assert statistics.loss(made - weight_NK) < {"wanda": 0.12, "sparsegpt": 0.08}[method] * by_magnitude
    if method == "wanda":
        assert torch.equal(made[made != 0], weight_NK[made != 0])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v2"])
def test_hqq_in_its_own_format(tmp_path, name, bits):
    """What is read is what was rounded, to the bit: minima are kept through zeros."""
    folder = folder_of(tmp_path / "in", CONFIGS[name])
    job, made = quantized(folder, tmp_path / "out", method="hqq", bits=bits, group_size=32)
    assert made.config["quantization_config"]["quant_method"] == "hqq"
    spec = read_spec(made.config)
    found = load_weights(made, spec, lower(spec), FLOAT32)
    plain = load_weights(folder, spec, lower(spec), FLOAT32)
    grid = Grid(job._form, torch.float32)
    rounded = {each.name for each in job.reports if "[" not in each.name}
    assert len(rounded) > 5
    for weight in rounded:
        expected = dequantize(methods.load("hqq").quantize(torch.from_numpy(plain[weight]), None, grid))
        np.testing.assert_array_equal(found[weight], expected, err_msg=weight)
