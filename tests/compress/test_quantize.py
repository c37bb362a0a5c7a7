"""`ridgeline quantize`: methods on single matrices, whole folders of several families, and runs in pieces."""

import json
import shutil

import numpy as np
import pytest
import torch

from ridgeline.backends.reference.dense import DenseMemory, dense_inputs, dense_logits
from ridgeline.backends.reference.interpreter import compute
from ridgeline.backends.reference.tensors import as_arrays, as_tensor, as_tensors
from ridgeline.compress import methods
from ridgeline.compress.calibrate import statistics_of
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import gptq, rtn
from ridgeline.compress.quantize import QuantizeJob
from ridgeline.compress.recipe import Recipe
from ridgeline.core.dtypes import BFLOAT16, DTYPES, FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.quality.texts import Texts
from ridgeline.quant.stored import dequantize
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights, open_checkpoint
from ridgeline.weights.save import save_weights

TEXTS = Texts(
    "here", {f"{i}.py": f"def f{i}(x):\n    return [x * {i} for _ in range({i * i})]\n" * 9 for i in range(12)}
)
FLOATS = ["mxfp4", "nvfp4"]  # methods of a format of their own
METHODS = [
    name
    for name in methods.names()
    if name not in (*FLOATS, "nf4", "fp8", "hqq", "smoothquant", "llm-int8", "wanda", "sparsegpt")
]
FORMS = [{"bits": 4, "group_size": 32}, {"bits": 4, "group_size": 64, "zero_points": True}, {"bits": 8}]
SIZES = {
    "vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
LATENT = {
    "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64,
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", "hidden_act": "silu"},
    "phi3": {"model_type": "phi3", "hidden_act": "silu", "pad_token_id": 0},  # q, k, v and gate, up in one tensor
    "gemma": {"model_type": "gemma", "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, "hidden_act": "silu", **EXPERTS},
    "deepseek_v2": {"model_type": "deepseek_v2", "hidden_act": "silu", **LATENT},
}


def folder_of(path, config, dtype="bfloat16", change=lambda weights: None):
    """A random model with the bundled models' tokenizer."""
    path.mkdir()
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")}
    config = (sizes if "mamba" in config["model_type"] else SIZES) | config | {"torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(config))
    for file in ModelFolder.open("python-1m").path.glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    spec = read_spec(config)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) > 1
        else torch.rand(shape, generator=generator) + 0.5
        for name, shape in lower(spec).weights.items()
    }
    change(weights)
    save_weights(path, spec, as_arrays(weights), DTYPES[dtype])
    return ModelFolder.open(path)


def quantized(folder, out, **recipe):
    job = QuantizeJob(folder, Recipe(**{"samples": 6, "length": 64, **recipe}), TEXTS, out)
    job.run(lambda progress: None)
    job.publish()
    return job, ModelFolder.open(out)


def logits(folder):
    spec = read_spec(folder.config)
    program = lower(spec)
    weights = as_tensors(load_weights(folder, spec, program, FLOAT32))
    ids = folder.tokenizer().encode(TEXTS.by_name["3.py"])[:64]
    with torch.inference_mode():
        return dense_logits(program, weights, torch.tensor([ids]))[0]


def logits_of_rounded(folder):
    """Logits with the inputs of every linear layer and expert rounded to 8 bits, a token by its own scale."""
    spec = read_spec(folder.config)
    program = lower(spec)
    weights = as_tensors(load_weights(folder, spec, program, FLOAT32))
    ids = torch.tensor([folder.tokenizer().encode(TEXTS.by_name["3.py"])[:64]])
    values, memory = dense_inputs(ids), DenseMemory(program.states, *ids.shape)
    with torch.inference_mode():
        for op in program.ops:
            if op.kind in ("linear", "experts"):
                x_TK = values[op.inputs[0]]
                scale_T1 = x_TK.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
                rounded = {**values, op.inputs[0]: (x_TK / scale_T1).round() * scale_T1}
                compute(op, weights, rounded, memory)
                values |= {name: rounded[name] for name in op.outputs}
            else:
                compute(op, weights, values, memory)
    return values[program.result]


def kl(base_TV, other_TV):
    log_p, log_q = base_TV.log_softmax(-1), other_TV.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def correlated_inputs(num_rows, num_inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(num_inputs, num_inputs, generator=generator)
    x = torch.randn(num_rows, num_inputs, generator=generator) @ (mix / num_inputs**0.5)
    return x * torch.logspace(-1, 1, num_inputs)[torch.randperm(num_inputs, generator=generator)]


def matrix(num_outputs=24, num_inputs=128):
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1))


def loss(method, weight, statistics, grid):
    stored = methods.load(method).quantize(weight, statistics, grid)
    return statistics.loss(as_tensor(dequantize(stored)) - weight)


# ---- one matrix: the contract of every method


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_a_stored_matrix_no_worse_than_rounding(name, form):
    grid = Grid(Recipe(**form).form(), torch.bfloat16)
    weight, statistics = matrix(), statistics_of([correlated_inputs(400, 128)])
    stored = methods.load(name).quantize(weight, statistics, grid)
    assert stored.format == grid.form
    assert stored.codes.shape == weight.shape
    assert stored.scales.shape == (24, grid.form.num_groups(128))
    assert (stored.scales == stored.scales.astype(BFLOAT16).astype(np.float32)).all()
    assert (stored.points is not None) == (grid.form.zero == "points")
    assert stored.codes.min() >= grid.lowest and stored.codes.max() <= grid.highest
    assert loss(name, weight, statistics, grid) <= loss("rtn", weight, statistics, grid) * 1.001
    unknown = methods.load(name).quantize(weight, None, grid)
    assert (unknown.codes == rtn.quantize(weight, None, grid).codes).all()
    s_K = methods.load(name).balance([weight], statistics, grid)
    assert s_K is None or (s_K.shape == (128,) and bool((s_K > 0).all()) and bool(s_K.isfinite().all()))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gptq_loses_a_quarter_less_at_least_where_inputs_are_correlated(form):
    grid, statistics = Grid(Recipe(**form).form(), torch.bfloat16), statistics_of([correlated_inputs(400, 128)])
    assert loss("gptq", matrix(), statistics, grid) < 0.75 * loss("rtn", matrix(), statistics, grid)


@pytest.mark.parametrize(
    "x_TK",
    [
        torch.zeros(5, 64),
        torch.outer(torch.arange(9.0), torch.linspace(-1, 1, 64)),  # of rank 1
        correlated_inputs(3, 64),  # fewer rows than inputs
        correlated_inputs(100, 64) * (torch.arange(64) % 3 > 0),  # inputs that are always zero
        correlated_inputs(100, 64) * 1e5,
    ],
    ids=["zero", "rank 1", "few rows", "dead inputs", "large"],
)
@pytest.mark.parametrize("name", METHODS)
def test_statistics_that_say_little_give_finite_weights(name, x_TK):
    grid, weight = Grid(Recipe(group_size=32).form(), torch.bfloat16), matrix(8, 64)
    statistics = statistics_of([x_TK])
    method = methods.load(name)
    s_K = method.balance([weight], statistics, grid)
    assert s_K is None or bool(s_K.isfinite().all())
    values = dequantize(method.quantize(weight, statistics, grid))
    assert np.isfinite(values).all()
    assert loss(name, weight, statistics, grid) <= loss("rtn", weight, statistics, grid) * 1.001


def test_gptq_of_columns_that_know_nothing_of_each_other_is_rounding_with_its_scales():
    """With H the identity no column makes up for another."""
    grid, weight = Grid(Recipe(group_size=32).form(), torch.bfloat16), matrix(16, 64)
    statistics = methods.Statistics(torch.eye(64), torch.ones(64), torch.ones(64), 64)
    found = gptq.quantize(weight, statistics, grid)
    w_NGS = grid.grouped(weight)
    scale, zero = grid.fit(w_NGS, torch.ones(2, 32))
    assert (found.codes == grid.codes(w_NGS, scale, zero).flatten(1).numpy()).all()


def test_awq_rescues_the_inputs_that_matter():
    """A few inputs of great magnitude, whose weights are as small as the others'."""
    grid, weight = Grid(Recipe(group_size=32).form(), torch.bfloat16), matrix()
    x_TK = torch.randn(400, 128, generator=torch.Generator().manual_seed(2))
    x_TK[:, ::40] *= 60
    statistics = statistics_of([x_TK])
    s_K = methods.load("awq").balance([weight], statistics, grid)
    assert s_K is not None
    scaled = dequantize(methods.load("awq").quantize(weight * s_K, statistics.divided(s_K), grid))
    assert statistics.loss(as_tensor(scaled) / s_K - weight) < 0.3 * loss("rtn", weight, statistics, grid)


def test_an_unknown_method_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"method must be one of awq, fp8, gptq, hqq, .* smoothquant, sparsegpt, wanda, got 'best'",
    ):
        methods.load("best")


def test_errors_move_on_to_the_groups_that_follow():
    """Within groups alone the loss would be 0.58 of rounding's."""
    grid, statistics = Grid(Recipe(group_size=32).form(), torch.bfloat16), statistics_of([correlated_inputs(400, 128)])
    assert loss("gptq", matrix(), statistics, grid) < 0.4 * loss("rtn", matrix(), statistics, grid)


# ---- whole folders


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", CONFIGS)
def test_eight_bits_of_a_family_say_what_the_model_says(tmp_path, family, method):
    """Through the checkpoint's own names and the reader, with norms divided where the method balances."""
    folder = folder_of(tmp_path / "model", CONFIGS[family])
    job, made = quantized(folder, tmp_path / "out", method=method, bits=8, group_size=32)
    base = logits(folder)
    assert kl(base, logits(made)) < (0.01 if "experts" in str(folder.config) else 4e-3)  # a choice of experts may flip
    spec = read_spec(made.config)
    checkpoint, _ = open_checkpoint(made, spec, lower(spec), FLOAT32)
    stored = [name for name in checkpoint.entries if checkpoint.format_of(name) is not None]
    assert all(str(checkpoint.format_of(name)) == "int8 in groups of 32" for name in stored)
    assert not {name for name in stored if "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight")}
    assert len(stored) >= 2 * {"phi3": 4, "deepseek_v2": 10, "qwen3_moe": 4 + 4 * 3}.get(family, 7)
    assert not job.left_out
    ratios = [report.error_ratio for report in job.reports if report.error_ratio is not None]
    assert bool(ratios) == (method != "rtn")
    assert np.mean(ratios or [1]) <= 1.02  # awq weighs matrices of one input together


def planting(family):
    """Make some channels of every norm 40 times as large, and the weights that read them as much smaller."""

    def plant(weights):
        offset = 1.0 if family == "gemma" else 0.0
        for name, weight in weights.items():
            if name.endswith("norm.weight") and name.startswith("layers.") and weight.shape == (64,):
                weight[::16] = (weight[::16] + offset) * 40 - offset
            elif name.endswith(("q.weight", "k.weight", "v.weight", "gate.weight", "up.weight", "router.weight")):
                weight[..., ::16] /= 40

    return plant


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3_moe"])
def test_planted_outliers_cost_awq_less_than_rounding(tmp_path, family):
    folder = folder_of(tmp_path / "model", CONFIGS[family], change=planting(family))
    base = logits(folder)
    found = {m: kl(base, logits(quantized(folder, tmp_path / m, method=m, group_size=32)[1])) for m in ("rtn", "awq")}
    assert found["awq"] < 0.7 * found["rtn"]


def test_an_expert_that_no_token_reaches_is_rounded_and_named(tmp_path):
    def close(weights):
        for name, weight in weights.items():
            if name.endswith("router.weight"):
                weight[3] = 0  # of a softmax over 4, the smallest cannot be the largest
                weight[1], weight[2] = -weight[0], 2 * weight[0]

    folder = folder_of(tmp_path / "model", CONFIGS["qwen3_moe"] | {"num_experts_per_tok": 1}, change=close)
    job, made = quantized(folder, tmp_path / "out", method="gptq", group_size=32)
    unseen = [report.name for report in job.reports if report.error_ratio is None]
    assert unseen
    assert all("[" in name for name in unseen)
    assert bool(logits(made).isfinite().all())


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
@pytest.mark.parametrize(
    ("sizes", "left"),
    [({"moe_intermediate_size": 96}, ["down"]), ({"hidden_size": 96}, ["gate", "up", "k", "q", "v"])],
)
def test_experts_of_which_not_all_matrices_have_whole_groups(tmp_path, method, sizes, left):
    folder = folder_of(tmp_path / "model", CONFIGS["qwen3_moe"] | sizes)
    job, made = quantized(folder, tmp_path / "out", method=method, group_size=64)
    assert {name.split(".")[-2] for name in job.left_out} == set(left)
    assert kl(logits(folder), logits(made)) < 0.2


def test_what_no_op_reads_stays_beside_what_it_shares_a_tensor_with(tmp_path):
    """The first positions of XLM-RoBERTa are those of no token."""
    config = {
        "model_type": "xlm-roberta", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 1,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 66, "type_vocab_size": 1,
    }  # fmt: skip
    source, spec = tmp_path / "model", read_spec(config)
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    weights = {name: np.ones(shape, np.float32) for name, shape in lower(spec).weights.items()}
    save_weights(source, spec, weights, FLOAT32)
    _, made = quantized(ModelFolder.open(source), tmp_path / "out", method="rtn", group_size=32)
    assert load_weights(made, spec, lower(spec), FLOAT32).keys() == weights.keys()


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("method", methods.names())
def test_a_run_in_pieces_makes_the_same_bytes(tmp_path, method):
    folder = folder_of(tmp_path / "model", CONFIGS["llama"] | {"intermediate_size": 128})
    size = None if method not in METHODS else 32
    quantized(folder, tmp_path / "whole", method=method, group_size=size)
    recipe = Recipe(method=method, group_size=size, samples=6, length=64)

    class KilledError(Exception):
        pass

    def kill(progress):
        raise KilledError

    for _ in range(2):
        with pytest.raises(KilledError):
            QuantizeJob(folder, recipe, TEXTS, tmp_path / "pieces").run(kill)
        assert not (tmp_path / "pieces").exists()
    (tmp_path / "pieces.partial" / "model-00002-of-00003.safetensors.partial").write_bytes(b"half")
    job = QuantizeJob(folder, recipe, TEXTS, tmp_path / "pieces")
    job.run(lambda progress: None)
    job.publish()
    assert files_of(tmp_path / "pieces") == files_of(tmp_path / "whole")
    assert {report.name for report in job.reports} >= {"layers.0.attn.q.weight", "layers.1.ffn.down.weight"}


def test_another_runs_state_and_a_folder_that_is_there_are_left_alone(tmp_path):
    folder = folder_of(tmp_path / "model", CONFIGS["llama"])
    QuantizeJob(folder, Recipe(method="rtn", group_size=32), TEXTS, tmp_path / "out").run(lambda progress: None)
    with pytest.raises(ConfigError, match="has the state of another run; delete it"):
        QuantizeJob(folder, Recipe(method="rtn", group_size=64), TEXTS, tmp_path / "out").run(lambda progress: None)
    with pytest.raises(ConfigError, match="exists already"):
        QuantizeJob(folder, Recipe(method="rtn", group_size=32), TEXTS, tmp_path / "model")


def test_what_cannot_be_quantized_is_told_why(tmp_path):
    folder = folder_of(tmp_path / "model", CONFIGS["llama"])
    with pytest.raises(ConfigError, match="no multiple of the group of 128"):
        QuantizeJob(folder, Recipe(method="rtn"), TEXTS, tmp_path / "out")
    job = QuantizeJob(folder, Recipe(method="rtn", group_size=64), TEXTS, tmp_path / "out")
    assert set(job.left_out) == {"layers.0.ffn.down.weight", "layers.1.ffn.down.weight"}
    job.run(lambda progress: None)
    assert kl(logits(folder), logits(ModelFolder.open(job.partial))) < 0.2
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 4096}
    config = {key: value for key, value in SIZES.items() if key in ("vocab_size",)} | gpt2
    (tmp_path / "gpt2").mkdir()
    spec = read_spec(config)
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    weights = {name: torch.zeros(shape) for name, shape in lower(spec).weights.items()}
    save_weights(tmp_path / "gpt2", spec, as_arrays(weights), FLOAT32)
    with pytest.raises(ConfigError, match="no matrix that can be quantized: its family stores it turned around"):
        QuantizeJob(ModelFolder.open(tmp_path / "gpt2"), Recipe(group_size=32), TEXTS, tmp_path / "out2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits must be one of 4, 8"),
        ({"group_size": 48}, "group_size must be one of 32, 64, 128"),
        ({"group_size": 0}, "group_size must be one of"),
        ({"bits": 8, "zero_points": True}, "8 bits have no zero points"),
        ({"method": "nvfp4", "bits": 8}, "method nvfp4 has 4 bits"),
        ({"method": "mxfp4", "mean_bits": 5.0}, "method mxfp4 has 4 bits"),
        ({"method": "fp8", "mean_bits": 5.0}, "method fp8 has 8 bits"),
        ({"method": "mxfp4", "group_size": 64}, "mxfp4 has groups of 32"),
    ],
)
def test_a_format_that_nobody_has_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**options)


# ---- what others read


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # it is the folder's, dequantized
@pytest.mark.parametrize("form", [*FORMS, {"bits": 4, "group_size": 32, "mean_bits": 6.0}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_computes_what_is_computed_here(tmp_path, form, dtype):
    """Weights bit for bit, by the library that defines the format, and the logits of transformers with it: no farther
    than inputs of 8 bits change them where the format asks for such."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder = folder_of(tmp_path / "model", CONFIGS["llama"], dtype)
    form = form | {"group_size": 32} if form["bits"] == 4 else form
    method = "rtn" if "mean_bits" in form else "gptq"
    _, made = quantized(folder, tmp_path / "out", method=method, **form)
    spec = read_spec(made.config)
    program = lower(spec)
    checkpoint, _ = open_checkpoint(made, spec, program, FLOAT32)
    scheme, *others = QuantizationConfig.model_validate(made.config["quantization_config"]).config_groups.values()
    assert len(others) == ("mean_bits" in form)
    raw = {}
    for path in made.path.glob("*.safetensors"):
        from safetensors.torch import load_file

        raw |= load_file(path)
    formats = set()
    for name in checkpoint.entries:
        layer = name.removesuffix(".weight")
        if f"{layer}.weight_scale" in raw:
            parts = {part.removeprefix(layer + "."): raw[part] for part in raw if part.startswith(layer + ".")}
            parts["weight_scale"] = parts["weight_scale"].float()
            own = next((other for other in others if layer in other.targets), scheme)
            formats.add((own.weights.num_bits, own.format))
            theirs = BaseCompressor.get_value_from_registry(own.format).decompress(parts, own)["weight"]
            assert torch.equal(theirs, torch.from_numpy(checkpoint.read(name, 0, (slice(None),)))), name
    has_both = "mean_bits" in form
    assert {bits for bits, _ in formats} == ({4, 8} if has_both else {form["bits"]})
    assert formats <= {(4, "pack-quantized"), (8, "int-quantized")}
    ids = torch.tensor([folder.tokenizer().encode(TEXTS.by_name["3.py"])[:64]])
    # Where it does not dequantize, transformers takes zero points for unpacked ones, of the library's own folders too.
    own = (
        {}
        if scheme.weights.symmetric
        else {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32, **own)
    with torch.inference_mode():
        theirs, ours = model(ids).logits[0], logits(made)
    if (8, "int-quantized") in formats:
        assert kl(ours, theirs) <= 1.2 * kl(ours, logits_of_rounded(made)) < 0.01
    else:
        most = 6e-2 if own else 2e-2  # dequantized weights have the dtype of their scales
        assert torch.allclose(theirs, ours, atol=most if dtype == "bfloat16" else 2e-4)


@pytest.mark.parametrize("method", FLOATS)
@pytest.mark.parametrize("family", CONFIGS)
def test_four_bit_floats_in_the_format_of_the_library(tmp_path, family, method):
    """Weights bit for bit, by the library, which rounds to bfloat16; read here, about as near the model as int4."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    folder = folder_of(tmp_path / "model", CONFIGS[family])
    job, made = quantized(folder, tmp_path / "out", method=method)
    assert bool(job.left_out) == ((family, method) == ("phi3", "nvfp4"))  # q, k and v are one tensor
    spec = read_spec(made.config)
    checkpoint, _ = open_checkpoint(made, spec, lower(spec), FLOAT32)
    (scheme,) = QuantizationConfig.model_validate(made.config["quantization_config"]).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(f"{method}-pack-quantized")
    raw = {key: tensor for path in made.path.glob("*.safetensors") for key, tensor in load_file(path).items()}
    layers = [name.removesuffix(".weight_packed") for name in raw if name.endswith(".weight_packed")]
    assert layers
    for layer in layers:
        parts = {part.removeprefix(layer + "."): raw[part] for part in raw if part.startswith(layer + ".")}
        theirs = compressor.decompress(parts, scheme)["weight"].float()
        ours = torch.from_numpy(checkpoint.read(f"{layer}.weight", 0, (slice(None),)))
        assert torch.equal(theirs, ours.bfloat16().float()), layer
    base, integers = logits(folder), quantized(folder, tmp_path / "int4", method="rtn", group_size=32)[1]
    assert kl(base, logits(made)) < {"mxfp4": 1.6, "nvfp4": 1.3}[method] * kl(base, logits(integers))


def test_nf4_in_the_format_of_bitsandbytes(tmp_path):
    """Codes and scales as the library makes them of the same weights, and its logits through transformers."""
    folder = folder_of(tmp_path / "model", CONFIGS["llama"] | {"intermediate_size": 128})
    job, made = quantized(folder, tmp_path / "out", method="nf4")
    assert not job.left_out
    base, integers = logits(folder), quantized(folder, tmp_path / "int4", method="rtn", group_size=32)[1]
    assert kl(base, logits(made)) < 1.3 * kl(base, logits(integers))
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    from safetensors.torch import load_file

    source, raw = (
        {key: tensor for file in path.glob("*.safetensors") for key, tensor in load_file(file).items()}
        for path in (folder.path, made.path)
    )
    spec = read_spec(made.config)
    checkpoint, _ = open_checkpoint(made, spec, lower(spec), FLOAT32)
    layers = [name.removesuffix(".absmax") for name in raw if name.endswith(".absmax")]
    assert len(layers) == 14
    for name in layers:
        codes, state = functional.quantize_4bit(source[name].float(), quant_type="nf4")
        assert torch.equal(codes, raw[name]) and torch.equal(state.absmax, raw[f"{name}.absmax"])
        parts = {key: tensor for key, tensor in raw.items() if key.startswith(f"{name}.")}
        theirs = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        assert torch.equal(theirs.code, state.code) and theirs.dtype == torch.bfloat16
        ours = torch.from_numpy(checkpoint.read(name, 0, (slice(None),)))
        assert torch.equal(functional.dequantize_4bit(codes, state), ours)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ids = torch.tensor([folder.tokenizer().encode(TEXTS.by_name["3.py"])[:64]])
    model = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.bfloat16)
    assert model.is_loaded_in_4bit
    with torch.inference_mode():
        theirs = model(ids).logits[0].float()
    assert kl(logits(made), theirs) < 0.1 * kl(base, logits(made))  # what bfloat16 rounds is all that differs


def test_fp8_in_the_format_of_the_library(tmp_path):
    """Weights bit for bit, by the library; inputs are rounded there, a token by its own scale."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    folder = folder_of(tmp_path / "model", CONFIGS["llama"])
    job, made = quantized(folder, tmp_path / "out", method="fp8")
    assert not job.left_out
    spec = read_spec(made.config)
    checkpoint, _ = open_checkpoint(made, spec, lower(spec), FLOAT32)
    config = QuantizationConfig.model_validate(made.config["quantization_config"])
    (scheme,) = config.config_groups.values()
    assert config.format == "float-quantized" and scheme.input_activations.dynamic
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    raw = {key: tensor for path in made.path.glob("*.safetensors") for key, tensor in load_file(path).items()}
    layers = [name.removesuffix(".weight_scale") for name in raw if name.endswith(".weight_scale")]
    assert len(layers) == 14
    for layer in layers:
        parts = {part: raw[f"{layer}.{part}"] for part in ("weight", "weight_scale")}
        parts["weight_scale"] = parts["weight_scale"].float()
        theirs = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(theirs, torch.from_numpy(checkpoint.read(f"{layer}.weight", 0, (slice(None),)))), layer
    base, integers = logits(folder), quantized(folder, tmp_path / "int4", method="rtn", group_size=32)[1]
    assert kl(base, logits(made)) < 0.2 * kl(base, logits(integers))


@pytest.mark.parametrize("method", ["fp8", *FLOATS])
def test_transformers_computes_floats_as_they_are_here(tmp_path, method):
    """In bfloat16, in which the library decodes 4 bits; of fp8 its inputs are 8-bit floats too."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = folder_of(tmp_path / "model", CONFIGS["llama"])
    made = quantized(folder, tmp_path / "out", method=method)[1]
    model = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.bfloat16)
    ids = torch.tensor([folder.tokenizer().encode(TEXTS.by_name["3.py"])[:64]])
    with torch.inference_mode():
        theirs = model(ids).logits[0].float()
    lost = kl(logits(folder), logits(made))
    assert kl(logits(made), theirs) < {"fp8": 1.0, "mxfp4": 0.05, "nvfp4": 0.05}[method] * lost


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3_moe"])
def test_smoothquant_rescues_inputs_of_eight_bits_from_planted_outliers(tmp_path, family):
    """The codes are the library's, inputs are to be rounded, and rounding them costs less than of the plain model."""
    folder = folder_of(tmp_path / "model", CONFIGS[family], change=planting(family))
    job, made = quantized(folder, tmp_path / "smooth", method="smoothquant")
    assert not job.left_out
    settings = made.config["quantization_config"]
    (group,) = settings["config_groups"].values()
    inputs = {key: group["input_activations"][key] for key in ("num_bits", "type", "strategy", "dynamic")}
    assert inputs == {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    assert settings["format"] == group["format"] == "int-quantized"
    base = logits(folder)
    assert kl(base, logits(made)) < 0.02  # weights alone
    plain = quantized(folder, tmp_path / "plain", method="rtn", bits=8)[1]
    assert kl(base, logits_of_rounded(made)) < 0.5 * kl(base, logits_of_rounded(plain))


def test_smoothquant_in_the_format_of_the_library(tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    made = quantized(folder_of(tmp_path / "model", CONFIGS["llama"]), tmp_path / "out", method="smoothquant")[1]
    spec = read_spec(made.config)
    checkpoint, _ = open_checkpoint(made, spec, lower(spec), FLOAT32)
    (scheme,) = QuantizationConfig.model_validate(made.config["quantization_config"]).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry("int-quantized")
    raw = {key: tensor for path in made.path.glob("*.safetensors") for key, tensor in load_file(path).items()}
    layers = [name.removesuffix(".weight_scale") for name in raw if name.endswith(".weight_scale")]
    assert len(layers) == 14
    for layer in layers:
        parts = {"weight": raw[f"{layer}.weight"], "weight_scale": raw[f"{layer}.weight_scale"].float()}
        theirs = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(theirs, torch.from_numpy(checkpoint.read(f"{layer}.weight", 0, (slice(None),)))), layer


@pytest.mark.parametrize("options", [{"group_size": 32}, {"zero_points": True}, {"mean_bits": 5.0}], ids=str)
def test_smoothquant_has_one_form(options):
    with pytest.raises(ConfigError):
        Recipe(method="smoothquant", **options)
