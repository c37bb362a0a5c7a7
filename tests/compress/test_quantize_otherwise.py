"""`ridgeline quantize` by methods with a folder of another kind: HQQ's, bitsandbytes' int8, plain ones with zeros."""

import numpy as np
import pytest
import torch
from test_quantize import CONFIGS, FLOATS, TEXTS, folder_of, kl, quantized
from test_quantize import logits as model_logits

from ridgeline.backends.probe import find_native
from ridgeline.backends.reference.dense import DenseMemory, dense_inputs, dense_logits
from ridgeline.backends.reference.interpreter import compute
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.compress import methods
from ridgeline.compress.calibrate import statistics_of
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import wanda
from ridgeline.compress.recipe import Recipe
from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.quality.scorer import Scorer
from ridgeline.quant.stored import dequantize
from ridgeline.spec.families import read_spec
from ridgeline.weights.load import load_weights, prequantized


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


def with_outliers(weights):
    """Two channels of each norm become 64 times as large, and what reads them as much smaller: the same function."""
    for layer in range(2):
        for norm, readers in (("mixer_norm", ("attn.q", "attn.k", "attn.v")), ("ffn_norm", ("ffn.gate", "ffn.up"))):
            weights[f"layers.{layer}.{norm}.weight"][[5, 40]] *= 64
            for reader in readers:
                weights[f"layers.{layer}.{reader}.weight"][:, [5, 40]] /= 64


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_moe", "deepseek_v2"])
def test_llm_int8_is_a_folder_of_bitsandbytes_with_its_outliers(tmp_path, name):
    """What is read is what was rounded, to the bit; linear layers alone have outliers, those of the text."""
    change = with_outliers if name == "llama" else lambda weights: None
    folder = folder_of(tmp_path / "in", CONFIGS[name], change=change)
    job, made = quantized(folder, tmp_path / "out", method="llm-int8")
    assert made.config["quantization_config"]["load_in_8bit"]
    spec = read_spec(made.config)
    program = lower(spec)
    found = load_weights(made, spec, program, FLOAT32)
    plain = load_weights(folder, spec, program, FLOAT32)
    for weight in {each.name for each in job.reports if "[" not in each.name}:
        scale_N1 = np.abs(plain[weight]).max(1, keepdims=True) / np.float32(127)
        expected = np.rint(plain[weight] / scale_N1) * scale_N1
        np.testing.assert_array_equal(found[weight], expected, err_msg=weight)
    forms = prequantized(made, spec, program).formats
    outliers = {weight: form.outliers for weight, form in forms.items()}
    assert all(not count for weight, count in outliers.items() if ".experts." in weight or "kv_b" in weight), outliers
    if name == "llama":
        read_norms = [weight for weight in outliers if weight.split(".")[-2] in ("q", "k", "v", "gate", "up")]
        assert len(read_norms) == 10 and {outliers[weight] for weight in read_norms} == {2}


@pytest.mark.skipif(find_native().module is None, reason="the native module is not built")
def test_outliers_in_16_bits_leave_8_bits_to_the_others(tmp_path):
    """Inputs of one group, two of them 64 times as large as the others."""
    folder = folder_of(tmp_path / "in", CONFIGS["llama"], change=with_outliers)
    _, made = quantized(folder, tmp_path / "llm-int8", method="llm-int8")
    quantized(folder, tmp_path / "rtn", method="rtn", bits=8)
    token_ids = folder.tokenizer().encode("def f(x):\n    return [x * 3 for _ in range(9)]\n" * 2)

    def rounded(op, x_TK):
        """Outliers in 16 bits, the others in 8, 64 of them by one scale."""
        form = forms.get(op.weights[0]) if op.kind == "linear" else None
        if form is None:
            return x_TK
        order = stored.matrix(op.weights[0], part=slice(1)).order
        order = np.arange(x_TK.shape[-1]) if order is None else order
        first, out = len(order) - form.outliers, x_TK.clone()
        for columns in (*(order[begin : min(begin + 64, first)] for begin in range(0, first, 64)), order[first:]):
            if len(columns):
                most = 32767 if columns[-1] == order[-1] and form.outliers else 127
                scale = x_TK[..., columns].abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
                out[..., columns] = (x_TK[..., columns] / scale).round() * scale
        return out

    def logits(method, inputs):
        options = {"dtype": "float32", "num_threads": 1, "quantize_inputs": inputs}
        scorer = Scorer(EngineConfig.of(str(tmp_path / method), **options), 128)
        return torch.cat([torch.from_numpy(part.copy()) for part in scorer.logits(token_ids)])

    lost = {method: kl(logits(method, "int16"), logits(method, "int8")) for method in ("llm-int8", "rtn")}
    assert 0 < lost["llm-int8"] < lost["rtn"] / 10, lost
    spec = read_spec(made.config)
    program = lower(spec)
    stored = prequantized(made, spec, program)
    forms = stored.formats
    weights = as_tensors(load_weights(made, spec, program, FLOAT32))
    values, memory = dense_inputs(torch.tensor([token_ids])), DenseMemory(program.states, 1, len(token_ids))
    for op in program.ops:
        inputs = {**values, op.inputs[0]: rounded(op, values[op.inputs[0]])}
        compute(op, weights, inputs, memory)
        values |= {name: inputs[name] for name in op.outputs}
    exact = logits("llm-int8", "int16")
    assert kl(values[program.result], logits("llm-int8", "int8")) < kl(values[program.result], exact) / 4


def test_llm_int8_by_the_library(tmp_path):
    """Its integers and scales are the folder's, which is ours but for the names of outliers; so are its logits."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers needs for it")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = folder_of(tmp_path / "in", CONFIGS["llama"], change=with_outliers)
    _, made = quantized(folder, tmp_path / "out", method="llm-int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.bfloat16)
    assert model.is_loaded_in_8bit
    spec = read_spec(made.config)
    found = load_weights(made, spec, lower(spec), FLOAT32)
    theirs = model.model.layers[1].mlp.up_proj.weight
    scale_N1 = theirs.SCB[:, None].numpy() / np.float32(127)
    np.testing.assert_array_equal(theirs.data.numpy() * scale_N1, found["layers.1.ffn.up.weight"])
    ids = torch.tensor([made.tokenizer().encode("def f(x):\n    return [x * 3 for _ in range(9)]\n" * 3)[:64]])
    with torch.inference_mode():
        logits_TV = model(ids).logits[0].float()
    program = lower(spec)
    assert kl(dense_logits(program, as_tensors(found), ids)[0], logits_TV) < 0.01


# ---- what others read, of every family


RECURRENT = {"model_type": "falcon_mamba", "state_size": 8, "time_step_rank": 32, "conv_kernel": 4, "expand": 2}
ROUND_TRIPS = {
    "gptq": ["phi3", "gemma", "qwen3_moe", "deepseek_v2", "falcon_mamba"],
    "smoothquant": ["phi3", "gemma", "falcon_mamba"],
    "fp8": ["phi3", "gemma", "qwen3_moe", "deepseek_v2", "falcon_mamba"],
    "mxfp4": ["phi3", "gemma", "qwen3_moe", "deepseek_v2", "falcon_mamba"],
    "nvfp4": ["phi3", "gemma", "falcon_mamba"],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # it is the folder's, dequantized
@pytest.mark.parametrize(
    ("family", "method"), [(each, method) for method in ROUND_TRIPS for each in ROUND_TRIPS[method]]
)
def test_transformers_loads_what_the_documents_say(tmp_path, family, method):
    """What rounds inputs as well loses about as much again; packed matrices of Mamba have to be dequantized."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = folder_of(tmp_path / "model", CONFIGS.get(family, RECURRENT))
    made = quantized(folder, tmp_path / "out", method=method, **({"group_size": 32} if method == "gptq" else {}))[1]
    rounds_inputs = method in ("smoothquant", "fp8")
    unpack = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    options = unpack if family == "falcon_mamba" and not rounds_inputs else {}
    dtype = torch.bfloat16 if method in FLOATS else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=dtype, **options)
    ids = torch.tensor([folder.tokenizer().encode(TEXTS.by_name["3.py"])[:64]])
    with torch.inference_mode():
        theirs = model(ids).logits[0].float()
    ours = model_logits(made)
    assert kl(ours, theirs) < (4 if rounds_inputs else 0.05) * kl(model_logits(folder), ours)


# ---- mixed precision under a budget of KL


def test_a_budget_of_kl_is_kept_by_as_few_matrices_of_8_bits_as_it_takes(tmp_path):
    folder = folder_of(tmp_path / "in", CONFIGS["llama"])

    def wide(name, **budget):
        job, made = quantized(folder, tmp_path / name, method="rtn", group_size=32, **budget)
        return sum(report.bits == 8 for report in job.reports), kl(base, model_logits(made)) / np.log(2)

    base = model_logits(folder)
    none, most = wide("none", budget_kl=100.0)
    assert none == 0
    some, less = wide("some", budget_kl=most / 3)
    every, least = wide("every", budget_kl=1e-6)
    assert 0 < some < every == 14 and least < less < most / 2
    within, _ = wide("within", budget_kl=1e-6, mean_bits=5.5)
    assert 0 < within < 14
    with pytest.raises(ConfigError, match="budget_kl is for --bits 4"):
        Recipe(bits=8, budget_kl=0.01)
    with pytest.raises(ConfigError, match="mean_bits and budget_kl out"):
        Recipe(method="nf4", budget_kl=0.01)
