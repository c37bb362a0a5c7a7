"""Folders of transformers' fp8, FBGEMM, ModelOpt, bitsandbytes and MLX: their formulas bit for bit, and clear refusals.

Matrices are written bit by bit, and by the libraries themselves where they are installed.
"""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from quantized_folder import EXAMPLE, LLAMA, change, check_bits, check_logits, load, loads_or_refuses, store
from safetensors.numpy import save_file
from small_checkpoint import described, write

from ridgeline.backends.native.settings import matrix_format
from ridgeline.compress.quantize import QuantizeJob
from ridgeline.compress.recipe import Recipe
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quality.texts import Texts
from ridgeline.quant.stored import LEVELS, dequantize
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights, prequantized

RNG = np.random.default_rng(0)
SEEDED = RNG.bit_generator.state
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.fixture(autouse=True)
def the_same_numbers():
    """A test's matrices depend neither on the tests before it nor on the process that it runs in."""
    RNG.bit_generator.state = SEEDED


def loaded(folder, config):
    return load_weights(folder, *described(config), FLOAT32)


def prequantized_of(folder, config):
    return prequantized(ModelFolder.open(folder), *described(config))


def float8(weight):
    stored = (weight * 64).astype(ml_dtypes.float8_e4m3fn)
    return stored, stored.astype(np.float32)


def native():
    return pytest.importorskip("ridgeline._native", reason="the native module is not built")


def positive(shape, dtype=np.float32):
    return (RNG.random(shape) / 64 + 0.004).astype(dtype)


def fp8(folder, *, suffix="weight_scale", config=LLAMA):
    def quantize(layer, weight):
        stored, numbers = float8(weight)
        scale = positive((1,) if "q_proj" in layer else ())
        parts = {f"{layer}.weight": stored, f"{layer}.{suffix}": scale, f"{layer}.input_scale": positive(())}
        return parts, numbers * scale

    settings = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return store(folder, settings, quantize, config)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_fp8_with_one_scale(tmp_path, suffix):
    check_bits(tmp_path, fp8(tmp_path, suffix=suffix))
    native()
    check_logits(tmp_path, stays=True, inputs="auto")


def fbgemm(folder, *, config=LLAMA):
    def quantize(layer, weight):
        (stored, numbers), scale = float8(weight), positive((len(weight), 1))
        parts = {f"{layer}.weight": stored, f"{layer}.weight_scale": scale, f"{layer}.input_scale_ub": positive((1,))}
        return parts, numbers * scale

    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    return store(folder, settings, quantize, config)


def test_fbgemm_fp8(tmp_path):
    check_bits(tmp_path, fbgemm(tmp_path))
    change(tmp_path, f"{EXAMPLE}.weight_scale", lambda x: x[:-1])
    with pytest.raises(ModelLoadError, match=r"FBGEMM's fp8 needs F32 .*\[128, 1\] beside"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def modelopt(folder, settings, config=LLAMA):
    """Attention in FP8, the rest in NVFP4; keys have a scale for a cache."""

    def quantize(layer, weight):
        if "attn" in layer:
            (stored, numbers), scale = float8(weight), positive((len(weight),) if "o_proj" in layer else ())
            extra = {f"{layer}.k_scale": positive(())} if "k_proj" in layer else {}
            parts = {f"{layer}.weight": stored, f"{layer}.weight_scale": scale, f"{layer}.input_scale": positive(())}
            return parts | extra, numbers * (scale[:, None] if scale.ndim else scale)
        num_outputs, num_inputs = weight.shape
        codes = RNG.integers(0, 16, weight.shape).astype(np.uint8)
        scales = positive((num_outputs, num_inputs // 16)).astype(ml_dtypes.float8_e4m3fn)
        overall = np.float32(0.003)
        parts = {
            f"{layer}.weight": codes[:, ::2] | codes[:, 1::2] << 4,
            f"{layer}.weight_scale": scales,
            f"{layer}.weight_scale_2": overall,
        }
        return parts, E2M1[codes] * np.repeat(scales.astype(np.float32) * overall, 16, axis=1)

    return store(folder, settings, quantize, config)


@pytest.mark.parametrize("algorithm", ["MXFP8", "fp8_pb_wo"])
def test_modelopt_with_scales_of_blocks(tmp_path, algorithm):
    rows, columns = (1, 32) if algorithm == "MXFP8" else (128, 128)

    def quantize(layer, weight):
        stored, numbers = float8(weight)
        count = -(-len(weight) // rows), weight.shape[1] // columns
        scale = RNG.integers(110, 120, count, dtype=np.uint8) if rows == 1 else positive((count[0], 1, count[1], 1))
        each = np.exp2(scale - np.float32(127)) if rows == 1 else scale[:, 0, :, 0]
        spread = np.repeat(np.repeat(each, rows, axis=0)[: len(weight)], columns, axis=1)
        return {f"{layer}.weight": stored, f"{layer}.weight_scale": scale}, numbers * spread

    expected = store(tmp_path, {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": columns}, quantize)
    form = check_bits(tmp_path, expected)
    assert (form.code, form.group) == ("e4m3", columns)


def test_modelopt(tmp_path):
    """The settings are in config.json, or in a file of their own."""
    expected = modelopt(tmp_path, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]})
    program = described(LLAMA)
    for _ in range(2):
        weights = load_weights(tmp_path, *program, FLOAT32)
        for source, name in {
            "self_attn.q_proj": "attn.q",
            "self_attn.o_proj": "attn.o",
            "mlp.up_proj": "ffn.up",
        }.items():
            assert np.array_equal(weights[f"layers.0.{name}.weight"], expected[f"model.layers.0.{source}"]), name
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    change(tmp_path, f"{EXAMPLE}.weight_scale", lambda x: -x)
    with pytest.raises(ModelLoadError, match="a negative scale"):
        load_weights(tmp_path, *program, FLOAT32)
    change(tmp_path, f"{EXAMPLE}.weight_scale_2", lambda x: 1000 / x)
    with pytest.raises(ModelLoadError, match="is it the reciprocal"):
        load_weights(tmp_path, *program, FLOAT32)
    own["quantization"]["quant_algo"] = "W4A8_AWQ"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(ConfigError, match="quant_algo='W4A8_AWQ'"):
        load_weights(tmp_path, *program, FLOAT32)


def test_modelopt_nvfp4_is_multiplied_as_it_is(tmp_path):
    """The native matrices give back the numbers of the formula, bit for bit; both backends say the same."""
    expected = modelopt(tmp_path, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    module = native()
    from ridgeline.backends.native.weights import NativeWeights

    stored = prequantized(ModelFolder.open(tmp_path), *described(LLAMA))
    assert "nvfp4" in {str(form).split()[0] for form in stored.formats.values()}
    form = matrix_format(stored.formats["layers.0.ffn.up.weight"], "int8", stored=True)
    weights = NativeWeights(dict, module.best_level(), 1, None, stored)
    for source, name in {"up_proj": "up", "down_proj": "down"}.items():
        wanted, name = expected[f"model.layers.0.mlp.{source}"], f"layers.0.ffn.{name}.weight"
        matrix = weights.matrix(name, [name], wanted.shape, form)
        found = [module.unpack_output(module.best_level(), matrix, n) for n in range(len(wanted))]
        np.testing.assert_array_equal(np.stack(found), wanted)
    check_logits(tmp_path, stays=True)


def four_bits(folder, *, kind="nf4", block=64, nested=True, storage=np.uint8, config=LLAMA):
    """By the definition, code by code; scales are quantized twice where `nested`."""

    def quantize(layer, weight):
        num_blocks = weight.size // block
        codes = RNG.integers(0, 16, weight.size).astype(np.uint8)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
        absmax, parts = positive(num_blocks), {}
        if nested:
            stored = RNG.integers(0, 256, num_blocks).astype(np.uint8)
            levels, outer = np.linspace(-1, 1, 256, dtype=np.float32), positive(-(-num_blocks // 256))
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            parts = {f"{layer}.weight.nested_absmax": outer, f"{layer}.weight.nested_quant_map": levels}
            absmax = levels[stored] * np.repeat(outer, 256)[:num_blocks] + np.float32(0.0625)
        parts |= {
            f"{layer}.weight": (codes[::2] << 4 | codes[1::2])[:, None].reshape(-1).view(storage)[:, None],
            f"{layer}.weight.absmax": stored if nested else absmax,
            f"{layer}.weight.quant_map": LEVELS[kind],
            f"{layer}.weight.quant_state.bitsandbytes__{kind}": np.frombuffer(json.dumps(state).encode(), np.uint8),
        }
        return parts, (LEVELS[kind][codes] * np.repeat(absmax, block)).reshape(weight.shape)

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "load_in_8bit": False}
    settings |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested, "llm_int8_threshold": 6.0}
    return store(folder, settings, quantize, config)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"nested": False, "storage": np.float32},
        {"kind": "fp4", "storage": ml_dtypes.bfloat16},
        {"block": 512, "nested": False},  # blocks of several rows
    ],
    ids=str,
)
def test_bitsandbytes_four_bits(tmp_path, case):
    check_bits(tmp_path, four_bits(tmp_path, **case))
    native()
    check_logits(tmp_path, stays=True)


@pytest.mark.parametrize(
    ("part", "make", "said"),
    [
        (".weight", lambda x: None, "has no .*weight beside"),
        (".weight", lambda x: x[:-1], "nf4 of .* needs"),
        (".weight.absmax", lambda x: None, "has no .*absmax"),
        (".weight.absmax", lambda x: x[1:], "absmax"),
        (".weight.nested_absmax", lambda x: x[1:], "nested_absmax"),
        (".weight.nested_quant_map", lambda x: None, "nested_quant_map"),
        (".weight.quant_map", lambda x: x[::-1], "is not the table of nf4"),
        (".weight.quant_state.bitsandbytes__nf4", lambda x: x[:-9], "JSON of a quant_state"),
        (".weight.quant_state.bitsandbytes__nf4", lambda x: np.frombuffer(b"[1]", np.uint8), "Expected `object`"),
        (".weight.quant_state.bitsandbytes__nf4", lambda x: x.astype(np.int32), "it is I32"),
        (".weight.quant_state.bitsandbytes__nf4", lambda x: None, "has no quant_state or SCB"),
    ],
)
def test_bitsandbytes_parts_that_do_not_fit(tmp_path, part, make, said):
    four_bits(tmp_path)
    change(tmp_path, EXAMPLE + part, make)
    with pytest.raises(ModelLoadError, match=said):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def eight_bits(folder, *, layout=0, outliers=None):
    def quantize(layer, weight):
        codes, scb = RNG.integers(-127, 128, weight.shape).astype(np.int8), positive(len(weight))
        parts = {f"{layer}.weight": codes, f"{layer}.SCB": scb, f"{layer}.weight_format": np.uint8(layout)}
        parts |= {} if outliers is None else {f"{layer}.outliers": np.array(outliers, np.int32)}
        return parts, codes * (scb / np.float32(127))[:, None]

    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_enable_fp32_cpu_offload": False}
    return store(folder, settings, quantize)


def test_bitsandbytes_int8_stays(tmp_path):
    check_bits(tmp_path, eight_bits(tmp_path))
    native()
    check_logits(tmp_path, stays=True)
    change(tmp_path, f"{EXAMPLE}.SCB", lambda x: None)
    assert not loads_or_refuses(tmp_path)
    eight_bits(tmp_path, layout=1)
    with pytest.raises(ModelLoadError, match="weight_format is not 0"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def test_bitsandbytes_int8_with_outliers_stays(tmp_path):
    form = check_bits(tmp_path, eight_bits(tmp_path, outliers=[3, 64, 127]))
    assert form.outliers == 3
    native()
    check_logits(tmp_path, stays=True)


@pytest.mark.parametrize("outliers", [[], [5, 4], [4, 4], [-1], [256], np.arange(256), [[1]], np.float32([1])], ids=str)
def test_outliers_are_some_inputs_in_order(tmp_path, outliers):
    eight_bits(tmp_path)
    kept = np.asarray(outliers, None if isinstance(outliers, np.ndarray) and outliers.dtype == np.float32 else np.int32)
    save_file(load(tmp_path) | {f"{EXAMPLE}.outliers": kept}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="save it again"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def mlx(folder, *, bits=4, group=64, dtype=np.float16, own=None, config=LLAMA, what="_proj.weight"):
    def quantize(layer, weight):
        num_outputs, num_inputs = weight.shape
        used = 8 if own and "down" in layer else bits
        codes = RNG.integers(0, 1 << used, weight.shape)
        spread = (codes[..., None] >> np.arange(used) & 1).astype(np.uint8).reshape(num_outputs, -1)
        scales, biases = (positive((num_outputs, num_inputs // group), dtype) * sign for sign in (1, -(1 << used) // 2))
        parts = {
            f"{layer}.weight": np.packbits(spread, axis=1, bitorder="little").view(np.uint32),
            f"{layer}.scales": scales.astype(dtype),
            f"{layer}.biases": biases.astype(dtype),
        }
        s, b = (np.repeat(parts[f"{layer}.{part}"].astype(np.float32), group, axis=1) for part in ("scales", "biases"))
        return parts, codes.astype(np.float32) * s + b

    expected = store(folder, None, quantize, config, what=what)
    settings = {"group_size": group, "bits": bits, "mode": "affine"}
    if own:
        settings |= {name: {"group_size": group, "bits": 8} for name in expected if "down" in name}
    settings |= {"model.layers.0.mlp.router": False}
    both = {"quantization": settings, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config | both))
    return expected


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({}, ""),
        ({"bits": 2, "group": 32, "dtype": np.dtype(ml_dtypes.bfloat16)}, ""),
        ({"bits": 3, "group": 128}, ""),
        ({"bits": 6}, ""),
        ({"bits": 8, "group": 32}, ""),
        ({"dtype": np.float32}, "float16 cannot hold its scales"),
    ],
    ids=str,
)
def test_mlx(tmp_path, case, why):
    form = check_bits(tmp_path, mlx(tmp_path, **case))
    assert form.zero == "minima"
    native()
    assert why in check_logits(tmp_path, stays=not why)


def mlx_floats(folder, mode):
    """MLX's other modes: floats in words, and one byte of a scale for each group."""
    bits, group = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]

    def quantize(layer, weight):
        codes = RNG.integers(0, 1 << bits, weight.shape, dtype=np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # of 8 bits no numbers
        scales = RNG.integers(90, 120, (len(weight), weight.shape[1] // group), dtype=np.uint8)
        numbers = E2M1[codes] if bits == 4 else codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        means = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) if mode == "nvfp4" else np.exp2(scales - 127.0)
        packed = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        parts = {f"{layer}.weight": packed.view(np.uint32), f"{layer}.scales": scales}
        return parts, (numbers * np.repeat(means, group, axis=1)).astype(np.float32)

    expected = store(folder, None, quantize)
    settings = {"group_size": group, "bits": bits, "mode": mode}
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization": settings}))
    return expected


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_mlx_floats(tmp_path, mode):
    form = check_bits(tmp_path, mlx_floats(tmp_path, mode))
    assert form.code == ("e4m3" if mode == "mxfp8" else "e2m1")
    change(tmp_path, f"{EXAMPLE}.scales", lambda x: x[:, 1:])
    assert not loads_or_refuses(tmp_path)


def test_mlx_scales_have_no_sign(tmp_path):
    mlx_floats(tmp_path, "nvfp4")
    change(tmp_path, f"{EXAMPLE}.scales", lambda x: x | 0x80)
    with pytest.raises(ModelLoadError, match="negative scale"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def test_mlx_layers_with_bits_of_their_own(tmp_path):
    expected = mlx(tmp_path, own=True)
    weights = load_weights(tmp_path, *described(LLAMA), FLOAT32)
    assert np.array_equal(weights["layers.1.ffn.down.weight"], expected[EXAMPLE])
    native()
    assert "dequantized" not in check_logits(tmp_path, stays=True)
    change(tmp_path, f"{EXAMPLE}.biases", lambda x: None)
    assert not loads_or_refuses(tmp_path)


def test_mlx_layers_of_their_own_take_nothing_of_the_models_settings(tmp_path):
    """What they leave out is MLX's default: whole numbers of 4 bits in groups of 64, beside floats of the model."""
    expected = mlx(tmp_path, own=True)
    own = {name: {"bits": 8} if "down" in name else {} for name in expected}
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"} | own
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization": settings}))
    weights = load_weights(tmp_path, *described(LLAMA), FLOAT32)
    assert np.array_equal(weights["layers.1.ffn.down.weight"], expected[EXAMPLE])


def test_mlx_experts_are_stacks(tmp_path):
    config = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
    expected = mlx(tmp_path, config=config, what=("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))
    tensors = load(tmp_path)
    for layer in ("model.layers.0.block_sparse_moe", "model.layers.1.block_sparse_moe"):
        for stored, name in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
            for part in ("weight", "scales", "biases"):
                each = [tensors.pop(f"{layer}.experts.{expert}.{stored}.{part}") for expert in range(3)]
                tensors[f"{layer}.switch_mlp.{name}.{part}"] = np.stack(each)
    save_file(tensors, tmp_path / "model.safetensors")
    weights, stored = (read(tmp_path, config) for read in (loaded, prequantized_of))
    for expert in range(3):
        matrix = expected[f"model.layers.1.block_sparse_moe.experts.{expert}.w2"]
        assert np.array_equal(weights["layers.1.ffn.down.weight"][expert], matrix)
        assert np.array_equal(dequantize(stored.matrix("layers.1.ffn.down.weight", expert)), matrix)
    native()
    check_logits(tmp_path, stays=True)
    job = QuantizeJob(ModelFolder.open(tmp_path), Recipe(method="rtn"), Texts("", {}), tmp_path / "out")
    job.run(lambda progress: None)  # under the names of transformers
    made = prequantized_of(job.partial, config)
    assert made.formats["layers.1.ffn.down.weight"].group == 128
    assert "model.layers.1.block_sparse_moe.experts.2.w2.weight" in made.tensors("layers.1.ffn.down.weight")
    change(tmp_path, "model.layers.1.block_sparse_moe.switch_mlp.down_proj.scales", lambda x: x[:2])
    with pytest.raises(ModelLoadError, match=r"MLX's 4 bits in groups of 64 needs .* \[3, 128, 4\]"):
        loaded(tmp_path, config)


MAMBA = {
    "vocab_size": 40, "hidden_size": 128, "intermediate_size": 256, "state_size": 8, "num_hidden_layers": 2,
    "time_step_rank": 8, "conv_kernel": 4, "expand": 2,
}  # fmt: skip
DELTA = LLAMA | {
    "model_type": "qwen3_next", "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("config", [MAMBA | {"model_type": "mamba"}, MAMBA | {"model_type": "falcon_mamba"}, DELTA])
def test_mlx_recurrent_models(tmp_path, config):
    """Taps are the second dimension of a convolution, and the norms of a model with delta nets hold their 1."""
    plain = write(tmp_path, config)
    expected = mlx(tmp_path, config=config, what=("in_proj.weight", "out_proj.weight", "_proj_qkvz.weight"))
    assert expected
    tensors = load(tmp_path)
    with_one = [name for name in tensors if config is DELTA and "norm" in name and ".linear_attn." not in name]
    assert len(with_one) == (7 if config is DELTA else 0)
    tensors |= {name: tensors[name] + np.float32(1) for name in with_one}
    tensors |= {name: tensors[name].swapaxes(1, 2).copy() for name in tensors if name.endswith(".conv1d.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    weights, formats = loaded(tmp_path, config), prequantized_of(tmp_path, config).formats
    others = [name for name in weights if name not in formats]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in others} >= {"mixer_norm", "final_norm", "embed"}
    assert any("conv" in name for name in others)
    for name in others:
        np.testing.assert_allclose(weights[name], plain[name], rtol=0, atol=3e-7, err_msg=name)
    out = "layers.0.delta.out.weight" if config is DELTA else "layers.0.mamba.out.weight"
    (numbers,) = [matrix for name, matrix in expected.items() if "0" in name and name.endswith("out_proj")]
    assert np.array_equal(weights[out], numbers) and out in formats
    native()
    check_logits(tmp_path, stays=True, atol=5e-3)  # of logits as large as random recurrences make them


@pytest.mark.parametrize("tied", [False, True])
def test_mlx_tables(tmp_path, tied):
    """Embedding and head are quantized as well, and one table serves as both where they are tied."""
    what = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")
    expected = mlx(tmp_path, config=LLAMA | {"tie_word_embeddings": tied}, what=what)
    config = LLAMA | {"tie_word_embeddings": tied}
    weights = load_weights(tmp_path, *described(config), FLOAT32)
    assert np.array_equal(weights["embed.weight"], expected["model.embed_tokens"])
    native()
    assert ("15" if tied else "16") + " matrices keep" in check_logits(tmp_path, stays=True)


def test_mlx_settings_that_are_not_supported(tmp_path):
    mlx(tmp_path)
    for changed, said in (
        ({"mode": "nvfp4"}, "nvfp4 has 4 in groups of 16"),
        ({"mode": "q4"}, "mode"),
        ({"bits": 7}, "bits=7"),
        ({"unheard_of": 1}, "unheard_of"),
    ):
        settings = {"group_size": 64, "bits": 4} | changed
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization": settings}))
        with pytest.raises(ConfigError, match=said):
            load_weights(tmp_path, *described(LLAMA), FLOAT32)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_itself(tmp_path, kind, nested):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")

    def quantize(layer, weight):
        codes, state = functional.quantize_4bit(
            torch.from_numpy(np.ascontiguousarray(weight)), quant_type=kind, compress_statistics=nested
        )
        parts = {f"{layer}.weight.{key}": part.numpy() for key, part in state.as_dict(packed=True).items()}
        return {f"{layer}.weight": codes.numpy(), **parts}, functional.dequantize_4bit(codes, state).numpy()

    check_bits(tmp_path, store(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True}, quantize))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_itself(tmp_path, bits):
    core = pytest.importorskip("mlx.core", reason="mlx is not installed")

    def quantize(layer, weight):
        parts = core.quantize(core.array(weight), group_size=64, bits=bits)
        numbers = np.array(core.dequantize(*parts, group_size=64, bits=bits))
        return {f"{layer}.{name}": np.array(p) for name, p in zip(("weight", "scales", "biases"), parts)}, numbers

    expected = store(tmp_path, {"group_size": 64, "bits": bits}, quantize)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization": {"group_size": 64, "bits": bits}}))
    weights = load_weights(tmp_path, *described(LLAMA), FLOAT32)
    np.testing.assert_allclose(weights["layers.1.ffn.down.weight"], expected[EXAMPLE], rtol=0, atol=1e-7)  # it may fuse


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_mlx_floats_themselves(tmp_path, mode):
    core = pytest.importorskip("mlx.core", reason="mlx is not installed")
    bits, group = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]

    def quantize(layer, weight):
        parts = core.quantize(core.array(weight), mode=mode)
        numbers = np.array(core.dequantize(*parts, mode=mode, dtype=core.float32))
        return {f"{layer}.{name}": np.array(p) for name, p in zip(("weight", "scales"), parts)}, numbers

    expected = store(tmp_path, None, quantize)
    settings = {"group_size": group, "bits": bits, "mode": mode}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization": settings}))
    check_bits(tmp_path, expected)


def auto_round(folder, packing, **settings):
    """Replaces a folder's settings by AutoRound's."""
    config = json.loads((folder / "config.json").read_text())
    own = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "data_type": "int"}
    config["quantization_config"] = own | {"autoround_version": "0.5.1", "iters": 200} | settings
    (folder / "config.json").write_text(json.dumps(config))


def test_auto_round_packs_as_gptq_or_awq(tmp_path):
    from test_awq import awq
    from test_gptq import gptq

    expected = gptq(tmp_path, sym=False)
    auto_round(
        tmp_path, "auto_round:auto_gptq", sym=False, extra_config={"lm_head": {"bits": 16, "data_type": "float"}}
    )
    check_bits(tmp_path, expected)
    native()
    check_logits(tmp_path, stays=True)
    expected = awq(tmp_path, group=32)
    auto_round(tmp_path, "auto_round:auto_awq", extra_config={".*head.*": {"bits": 16}})
    check_bits(tmp_path, expected)


def test_auto_round_layers_with_bits_of_their_own(tmp_path):
    from test_gptq import gptq

    expected = gptq(tmp_path, bits=8)
    auto_round(tmp_path, "auto_round:auto_gptq", sym=True, extra_config={r"model\.layers.*": {"bits": 8}})
    check_bits(tmp_path, expected)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format"),
        ({"data_type": "mx_fp"}, "data_type='mx_fp'"),
        ({"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}}, "up_proj is plain; it is quantized"),
        ({"extra_config": {"lm_head": {"bitz": 4}}}, "bitz"),
        ({"unheard_of": 1}, "unheard_of"),
        (
            {"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"bits": 8}}},
            "'a' has bits or groups of its",
        ),
    ],
)
def test_auto_round_settings_that_are_not_supported(tmp_path, changed, said):
    from test_gptq import gptq

    gptq(tmp_path)
    auto_round(tmp_path, "auto_round:auto_gptq", sym=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)
