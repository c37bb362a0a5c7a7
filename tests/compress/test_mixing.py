"""Mixed precision: which matrices get 8 bits, and what says so, found a layer at a time."""

import weakref

import numpy as np
import pytest
import torch
from test_quantize import CONFIGS, files_of, folder_of, kl, logits, quantized

from ridgeline.backends.reference.dense import dense_logits
from ridgeline.backends.reference.tensors import as_tensor, as_tensors
from ridgeline.compress import mix, quantize
from ridgeline.compress.calibrate import LAYER
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import rtn
from ridgeline.compress.recipe import Recipe
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.quant.stored import dequantize
from ridgeline.spec.families import read_spec
from ridgeline.weights.load import load_weights
from ridgeline.weights.save import write_tensors


def test_mixed_precision_gives_eight_bits_where_they_pay(tmp_path):
    """A matrix of groups with an outlier each; those that run as one are chosen as one, within the mean."""

    def plant(weights):
        weights["layers.1.ffn.down.weight"][:, ::32] *= 30

    folder = folder_of(tmp_path / "model", CONFIGS["llama"], change=plant)
    job, made = quantized(folder, tmp_path / "mixed", method="gptq", group_size=32, mean_bits=5.3)
    bits = {report.name: report.bits for report in job.reports}
    assert bits["layers.1.ffn.down.weight"] == 8
    sizes = lower(read_spec(made.config)).weights
    stored = sum(np.prod(sizes[name]) * (8.5 if b == 8 else 4.5) for name, b in bits.items())
    assert stored / sum(np.prod(sizes[name]) for name in bits) <= 5.3 + 0.3  # a float32 scale per output is counted
    for layer in range(2):
        for names in (("attn.q", "attn.k", "attn.v"), ("ffn.gate", "ffn.up")):
            assert len({bits[f"layers.{layer}.{name}.weight"] for name in names}) == 1
    groups = made.config["quantization_config"]["config_groups"]
    assert [group["weights"]["num_bits"] for group in groups.values()] == [4, 8]
    base = logits(folder)
    uniform = kl(base, logits(quantized(folder, tmp_path / "uniform", method="gptq", group_size=32)[1]))
    assert kl(base, logits(made)) < 0.85 * uniform


def test_the_estimate_of_a_matrix_is_its_kl(tmp_path):
    """The Fisher form beside the KL of a model in which one matrix alone is rounded."""
    folder = folder_of(tmp_path / "model", CONFIGS["llama"], "float32")
    spec = read_spec(folder.config)
    program = lower(spec)
    arrays = load_weights(folder, spec, program, FLOAT32)
    weights = as_tensors(arrays)
    ids = torch.randint(0, 4096, (32, 64), generator=torch.Generator().manual_seed(3))
    grid = Grid(Recipe(group_size=32).form(), torch.float32)
    names = frozenset({"layers.0.attn.v.weight", "layers.1.ffn.up.weight"})

    def error_NK(weight_NK):
        return as_tensor(dequantize(rtn.quantize(weight_NK, None, grid))) - weight_NK

    sweep = mix.Sweep(program, arrays, [ids], 0, tmp_path / "sweep")
    estimates = sweep.estimates(names, lambda weight_NK, tap: tap.kl_bits(error_NK(weight_NK)))
    base = dense_logits(program, weights, ids).flatten(0, 1)
    for name in names:
        rounded = weights[name] + error_NK(weights[name])
        real = kl(base, dense_logits(program, weights | {name: rounded}, ids).flatten(0, 1)) / np.log(2)
        assert estimates[name] == pytest.approx(real, rel=0.5)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_estimates_hold_one_layer_and_go_on_where_they_were_killed(tmp_path, monkeypatch, family):
    folder = folder_of(tmp_path / "model", CONFIGS[family], "float32")
    spec = read_spec(folder.config)
    program = lower(spec)
    weights = load_weights(folder, spec, program, FLOAT32)
    alive = weakref.WeakValueDictionary()

    class Watched(dict):
        def __getitem__(self, name):
            layers = {match[1] for other in (name, *alive) if (match := LAYER.match(other))}
            assert len(layers) <= 1, f"{name} is read while {sorted(alive)} are in memory"
            alive[name] = copy = weights[name].copy()
            return copy

    names = frozenset(name for name in program.weights if name.endswith((".attn.o.weight", ".ffn.down.weight")))
    ids = torch.randint(0, 4096, (4, 64), generator=torch.Generator().manual_seed(3))

    def swept(place):
        sweep = mix.Sweep(program, Watched(), [ids], 0, tmp_path / place)
        return sweep.estimates(names, lambda weight_NK, tap: tap.kl_bits(weight_NK))

    whole, written = swept("whole"), []

    class KilledError(Exception):
        pass

    def save(path, tensors):
        write_tensors(path, tensors)
        written.append(path.name)
        raise KilledError

    monkeypatch.setattr(mix, "write_tensors", save)
    for _ in range(5):  # two layers forward, the head and two layers back
        with pytest.raises(KilledError):
            swept("pieces")
    assert swept("pieces") == whole
    assert whole and len(set(written)) == len(written) == 5


@pytest.mark.parametrize(("options", "bound"), [({"mean_bits": 4.1}, "4.125"), ({"bits": 8, "mean_bits": 5}, "bits 4")])
def test_a_mean_that_cannot_be_is_refused(options, bound):
    with pytest.raises(ConfigError, match=f"mean_bits is for .*{bound}"):
        Recipe(**options)


def test_a_run_killed_while_bits_are_chosen_goes_on_and_is_nobody_elses(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "model", CONFIGS["llama"])

    class KilledError(Exception):
        pass

    def choose(*given):
        raise KilledError

    def run(out, **more):
        return quantized(folder, tmp_path / out, method="rtn", group_size=32, mean_bits=5.3, **more)[1]

    with monkeypatch.context() as patched:
        patched.setattr(quantize, "wide_matrices", choose)
        with pytest.raises(KilledError):
            run("pieces")
    with pytest.raises(ConfigError, match="has the state of another run"):
        run("pieces", seed=1)
    assert files_of(run("pieces").path) == files_of(run("whole").path)
