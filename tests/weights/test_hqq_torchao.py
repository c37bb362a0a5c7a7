"""Folders of HQQ and torchao: their formulas, what is rounded, both libraries' own tensors, and clear refusals."""

import json

import numpy as np
import pytest
import torch
from quantized_folder import EXAMPLE, LLAMA, change, check_logits, load, loads_or_refuses, store
from safetensors.numpy import save_file
from small_checkpoint import described

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import load as method
from ridgeline.compress.methods import rtn
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant.inputs import why_decoded
from ridgeline.quant.stored import StoredFormat, dequantize
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.formats.hqq import packed_tensors, quantization_config
from ridgeline.weights.load import load_weights, prequantized

RNG = np.random.default_rng(0)
SEEDED = RNG.bit_generator.state
FLOAT16_STEP = 2.0**-11  # of a number, at most


@pytest.fixture(autouse=True)
def the_same_numbers():
    """A test's matrices depend neither on the tests before it nor on the process that it runs in."""
    RNG.bit_generator.state = SEEDED


def positive(shape, dtype=np.float16):
    return (RNG.random(shape) / 64 + 0.004).astype(dtype)


def settings(bits, group, *ignored):
    return quantization_config(StoredFormat("uniform", bits, group, "minima"), ignored, {})


def hqq(folder, *, bits=4, group=64, axis=1, config=LLAMA, **changed):
    def quantize(layer, weight):
        num_rows = weight.size // group
        codes = RNG.integers(0, 1 << bits, (num_rows, group))
        scale, zero = positive((num_rows, 1)), (RNG.random((num_rows, 1)) * (1 << bits)).astype(np.float16)
        per = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
        numbers = (codes - zero.astype(np.float64)) * scale
        if axis == 0:  # what is an axis 1 of the matrix whose flat numbers are turned around
            scale, zero, codes, num_rows = scale.T, zero.T, codes.T, group
            numbers = numbers.T
        step = -(-num_rows // per)
        padded = np.zeros((per * step, codes.shape[1]), np.int64)
        padded[:num_rows] = codes
        packed = sum(padded[i * step : (i + 1) * step] << bits * (per - 1 - i) for i in range(per))
        facts = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": 1, "view_as_float": 0} | changed
        parts = {key: np.array(value, np.int32) for key, value in facts.items()}
        parts |= {"W_q": packed.astype(np.int32 if bits == 3 else np.uint8), "scale": scale, "zero": zero}
        parts |= {"shape": np.array(weight.shape, np.int64), "packing": np.frombuffer(b"4bit_u8", np.uint8)}
        return {f"{layer}.{key}": part for key, part in parts.items()}, numbers.reshape(weight.shape)

    return store(folder, settings(bits, group, "lm_head"), quantize, config)


def torchao(folder, kind="Int4Tensor", *, group=64, bits=4, symmetric=False, config=LLAMA):
    about = {"tensor_names": "[]"}

    def quantize(layer, weight):
        num_outputs, num_inputs = weight.shape
        half, count = 1 << (bits - 1), num_inputs // group
        codes = RNG.integers(-half, half, weight.shape)
        scale, data = positive((num_outputs, count), np.float32 if kind == "Int8Tensor" else np.float16), {}
        zero = np.zeros((num_outputs, count), np.float16)
        if kind == "Int4Tensor":
            zero = zero if symmetric else (RNG.random(zero.shape) / 16).astype(np.float16)
            nibble = codes & 15
            qdata = (nibble[:, ::2] | nibble[:, 1::2] << 4).astype(np.uint8).view(np.int8)
            numbers = codes * spread(scale, group) + spread(zero, group)
            parts = {"qdata": qdata, "scale": scale.T, "zero_point": zero.T}
        else:
            zero = zero if symmetric else RNG.integers(-half, half, zero.shape).astype(np.int8)
            numbers = (codes - spread(zero, group)) * spread(scale, group)
            parts = {"qdata": codes.astype(np.int8), "scale": scale, "zero_point": zero}
            data = {"target_dtype": {"_type": "torch.dtype", "_data": f"int{bits}"}}
        if kind == "Int8Tensor":
            del parts["zero_point"]
        about[f"{layer}.weight"] = json.dumps({"_type": kind, "_data": {"block_size": [1, group], **data}})
        return {f"{layer}._weight_{key}": part for key, part in parts.items()}, numbers

    expected = store(folder, {"quant_method": "torchao", "quant_type": {}}, quantize, config)
    save_file(load(folder), folder / "model.safetensors", about)
    return expected


def spread(values, group):
    return np.repeat(values.astype(np.float64), group, axis=1)


def check(folder, expected, most):
    """The numbers are those of the formula to within `most`; returns how they are stored."""
    spec, program = described(LLAMA)
    weights = load_weights(folder, spec, program, FLOAT32)
    assert np.abs(weights["layers.1.ffn.down.weight"] - expected[EXAMPLE]).max() <= most
    assert np.abs(weights["layers.1.attn.q.weight"] - expected["model.layers.1.self_attn.q_proj"]).max() <= most
    stored = prequantized(ModelFolder.open(folder), spec, program)
    matrix = dequantize(stored.matrix("layers.1.ffn.down.weight", part=slice(5, 27)))
    np.testing.assert_array_equal(matrix, weights["layers.1.ffn.down.weight"][5:27])
    return stored.formats["layers.1.ffn.down.weight"]


@pytest.mark.parametrize(
    ("bits", "group"), [(4, 64), (4, 32), (4, 128), (8, 64), (3, 64), (2, 32), (1, 64), (5, 64), (6, 128)]
)
def test_hqq(tmp_path, bits, group):
    expected = hqq(tmp_path, bits=bits, group=group)
    form = check(tmp_path, expected, FLOAT16_STEP * (1 << bits) * 0.02)
    assert (form.zero, form.bits) == ("minima", 8 if bits > 4 else 4)
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    check_logits(tmp_path, stays=True, atol=4e-3 if bits == 5 else 1e-3)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_hqq_along_outputs_is_decoded_with_a_reason(tmp_path, bits):
    """Every other output, of groups of half of them, has scales of its own for each input."""
    expected = hqq(tmp_path, bits=bits, axis=0)
    form = check(tmp_path, expected, FLOAT16_STEP * (1 << bits) * 0.02)
    assert why_decoded(form) == "no kernel has groups of 1 inputs"
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    check_logits(tmp_path, stays=False)


@pytest.mark.parametrize(
    "changed",
    [{"axis": 2}, {"view_as_float": 1}, {"nbits": 7}, {"nbits": 5}, {"group_size": 48}, {"quant_zero": 1}],
)
def test_hqq_that_is_not_supported(tmp_path, changed):
    hqq(tmp_path, **changed)
    with pytest.raises(ModelLoadError, match="HQQ"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("key", ["nbits", "group_size", "axis"])
def test_hqq_numbers_that_are_none(tmp_path, key, number):
    hqq(tmp_path)
    change(tmp_path, f"{EXAMPLE}.{key}", lambda x: np.full_like(x, number, np.float32))
    assert not loads_or_refuses(tmp_path)


def test_hqq_parts_that_are_missing(tmp_path):
    hqq(tmp_path)
    change(tmp_path, f"{EXAMPLE}.zero", lambda x: None)
    assert not loads_or_refuses(tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_written_is_read(bits, tmp_path):
    grid = Grid(StoredFormat("uniform", bits, 64, "minima"), torch.float32)
    made = {}

    def quantize(layer, weight):
        weight = np.array(weight)
        weight[:, :64] = 0.5  # a group of one number
        made[layer] = method("hqq").quantize(torch.from_numpy(weight), None, grid)
        return packed_tensors(layer, made[layer], FLOAT32), dequantize(made[layer])

    expected = store(tmp_path, settings(bits, 64, "lm_head"), quantize)
    assert check(tmp_path, expected, 0) == grid.form
    assert np.array_equal(expected[EXAMPLE][:, :64], np.full((128, 64), 0.5))


def test_hqq_loses_less_than_rounding_of_what_has_outliers():
    """The p of its norm is 0.7: the error that counts is the mean of |d|^p."""
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(rng.standard_t(3, (64, 256)).astype(np.float32))

    def loss(stored):
        return (torch.from_numpy(dequantize(stored)) - weight).abs().pow(0.7).mean()

    found = method("hqq").quantize(weight, None, Grid(StoredFormat("uniform", 4, 64, "minima"), torch.float32))
    plain = rtn.quantize(weight, None, Grid(StoredFormat("uniform", 4, 64, "points"), torch.float32))
    assert loss(found) < 0.98 * loss(plain)


@pytest.mark.parametrize(
    ("kind", "options", "zero", "most"),
    [
        ("Int4Tensor", {}, "minima", 0.25 * FLOAT16_STEP),
        ("Int4Tensor", {"symmetric": True, "group": 32}, "fixed", 1e-7),
        ("IntxUnpackedToInt8Tensor", {}, "points", 1e-6),
        ("IntxUnpackedToInt8Tensor", {"bits": 8, "symmetric": True}, "fixed", 1e-6),
        ("IntxUnpackedToInt8Tensor", {"bits": 8}, "points", 1e-6),
        ("Int8Tensor", {"bits": 8, "symmetric": True, "group": 64}, "fixed", 1e-6),
    ],
    ids=str,
)
def test_torchao(tmp_path, kind, options, zero, most):
    form = check(tmp_path, torchao(tmp_path, kind, **options), most)
    assert form.zero == zero
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    check_logits(tmp_path, stays=(form.bits, form.zero) != (8, "points") and form.scale == "float16")


def test_torchao_that_is_not_supported(tmp_path):
    torchao(tmp_path, "Int4TilePackedTo4dTensor")
    with pytest.raises(ConfigError, match="Int4TilePackedTo4dTensor"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)
    save_file(load(tmp_path), tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="metadata"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_hqq_itself(tmp_path, bits, axis):
    core = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")

    def quantize(layer, weight):
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        plain.weight.data = torch.from_numpy(np.ascontiguousarray(weight))
        config = core.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
        made = core.HQQLinear(plain, config, compute_dtype=torch.float16, device="cpu")
        parts = {f"{layer}.{key}": part.detach().numpy() for key, part in made.state_dict().items() if part is not None}
        return parts, made.dequantize().float().numpy()

    check(tmp_path, store(tmp_path, settings(bits, 64), quantize), 3e-3)  # the library computes in float16


@pytest.mark.parametrize("bits", [4, 8])
def test_torchao_itself(tmp_path, bits):
    ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    about = {}

    def quantize(layer, weight):
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        plain.weight.data = torch.from_numpy(np.ascontiguousarray(weight))
        dtype = torch.int4 if bits == 4 else torch.int8
        ao.quantize_(plain, ao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=ao.PerGroup(64)))
        parts, said = flatten_tensor_state_dict({f"{layer}.weight": plain.weight.data})
        about.update(said)
        return {key: part.numpy() for key, part in parts.items()}, plain.weight.dequantize().detach().numpy()

    expected = store(tmp_path, {"quant_method": "torchao"}, quantize)
    save_file(load(tmp_path), tmp_path / "model.safetensors", about)
    check(tmp_path, expected, 1e-6)
