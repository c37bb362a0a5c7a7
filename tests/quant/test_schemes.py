"""What every scheme must hold, over the files of quant/schemes, and what each of them promises beyond it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import quant
from ridgeline.backends.reference.tensors import as_array, as_tensor
from ridgeline.core.config import QuantizeConfig, scheme_names
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant.stored import LEVELS as STORED_LEVELS

# (group size, zero points) that a scheme takes, and the levels its values have; a new scheme gets a line.
SETTINGS = {
    "int8": [(None, False)],
    "int4": [(size, zero_points) for size in (32, 64, 128) for zero_points in (False, True)],
    "mxfp4": [(None, False)],
    "nvfp4": [(None, False)],
    "nf4": [(None, False)],
    "fp8": [(None, False)],
}
LEVELS = {"int8": (1, 255), "int4": (0, 15), "mxfp4": (0, 15), "nvfp4": (0, 15), "nf4": (0, 15), "fp8": (0, 254)}
SCALE_DTYPE = {
    "int8": torch.float32, "int4": torch.float16, "mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn,
    "nf4": torch.float32, "fp8": torch.float32,
}  # fmt: skip
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
SMALLEST = 2.0**-24  # of a float16: an absolute error that scales this small cannot avoid
CASES = [(name, *chosen) for name, all_settings in SETTINGS.items() for chosen in all_settings]
every_setting = pytest.mark.parametrize(("name", "group_size", "zero_points"), CASES)
every_integer = pytest.mark.parametrize(
    ("name", "group_size", "zero_points"), [case for case in CASES if case[0] in ("int8", "int4")]
)
every_float = pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])


@st.composite
def matrices(draw):
    """Odd shapes; normal, heavy-tailed, one-sided, constant, sparse and tiny values."""
    shape = draw(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 31, 32, 33, 64, 100, 128, 129, 257])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(shape, generator=generator)
    kind = draw(st.sampled_from(["normal", "heavy", "positive", "negative", "constant", "sparse", "shifted"]))
    w = {
        "normal": w,
        "heavy": w**5,
        "positive": w.abs(),
        "negative": -w.abs(),
        "constant": torch.full(shape, w[0, 0].item()),
        "sparse": torch.where(torch.rand(shape, generator=generator) < 0.8, torch.tensor(0.0), w),
        "shifted": w + 3,
    }[kind]
    return w * 10.0 ** draw(st.integers(-7, 2))  # int4 scales are float16


def form_of(name, group_size, zero_points):
    return quant.scheme(name).stored_format(group_size, zero_points)


def quantize(name, weight, group_size, zero_points):
    """The stored form, its arrays as tensors."""
    stored = quant.quantize(name, as_array(weight), form_of(name, group_size, zero_points))
    return SimpleNamespace(
        stored=stored,
        values=as_tensor(stored.codes),
        scales=as_tensor(stored.scales),
        zero_points=None if stored.points is None else as_tensor(stored.points),
        group_size=stored.format.group or weight.shape[1],
    )


def dequantize(name, quantized):
    return as_tensor(quant.dequantize(quantized.stored))


def spread(per_group_NG, quantized):
    return per_group_NG.repeat_interleave(quantized.group_size, 1)[:, : quantized.values.shape[1]]


def test_the_settings_above_are_those_of_the_folder():
    assert sorted(SETTINGS) == scheme_names()


@every_integer
@given(weight=matrices())
@settings(max_examples=60, deadline=None)
def test_error_is_at_most_half_a_step(name, group_size, zero_points, weight):
    """Half a step, but where int4 without zero points holds a value beyond 7 steps to 7: there up to one."""
    quantized = quantize(name, weight, group_size, zero_points)
    error = (weight - dequantize(name, quantized)).abs().double()
    step = spread(quantized.scales, quantized).abs().double()
    held = torch.zeros_like(weight, dtype=torch.bool)
    if name == "int4" and not zero_points:
        held = (weight / spread(quantized.scales, quantized) > 7.5) & (step > 0)
        assert (quantized.values[held] == 15).all()
    # 1 %: float16 rounds the scale, which moves the ends of the range by 8 or 15 times 2^-11 of a step.
    bound = torch.where(held, 1.0, 0.5) * step * 1.01 + 16 * SMALLEST
    assert (error <= bound).all(), (error - bound).max()


@every_setting
@given(weight=matrices())
@settings(max_examples=40, deadline=None)
def test_stored_form(name, group_size, zero_points, weight):
    """Values fit their bits, scales their type, and zero is exact."""
    quantized = quantize(name, weight, group_size, zero_points)
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // quantized.group_size)
    assert (quantized.values.dtype, tuple(quantized.values.shape)) == (torch.uint8, (num_outputs, num_inputs))
    assert (quantized.scales.dtype, tuple(quantized.scales.shape)) == (torch.float32, (num_outputs, num_groups))
    low, high = LEVELS[name]
    assert low <= quantized.values.min() and quantized.values.max() <= high
    assert torch.equal(quantized.scales.to(SCALE_DTYPE[name]).float(), quantized.scales)
    assert quantized.scales.isfinite().all()
    assert (quantized.zero_points is not None) == zero_points
    if quantized.zero_points is not None:
        assert quantized.zero_points.dtype == torch.uint8 and quantized.zero_points.shape == quantized.scales.shape
        assert quantized.zero_points.max() <= high
    assert (dequantize(name, quantized)[weight == 0] == 0).all()


@every_setting
def test_claimed_bytes_are_those_of_the_parts(name, group_size, zero_points):
    for shape in ((5, 256), (3, 300), (1, 1)):
        quantized = quantize(name, torch.randn(shape), group_size, zero_points)
        bits = max(1, LEVELS[name][1].bit_length())
        values = shape[0] * -(-shape[1] * bits // 8)
        scales = quantized.scales.numel() * torch.finfo(SCALE_DTYPE[name]).bits // 8
        zeros = 0 if quantized.zero_points is None else quantized.zero_points.numel()
        zeros += 4 * shape[0] if name == "nvfp4" else 0
        assert quantized.stored.format.num_bytes(shape) == values + scales + zeros


@every_setting
def test_a_matrix_is_the_same_in_any_dtype_and_in_any_chunks(name, group_size, zero_points):
    """Rows are independent, and what the dtype holds exactly makes no difference."""
    weight = torch.randn(3000, 200).bfloat16()
    whole = quantize(name, weight, group_size, zero_points)
    assert torch.equal(whole.values, quantize(name, weight.float(), group_size, zero_points).values)
    for row in (0, 654, 655, 656, 2999):
        alone = quantize(name, weight[row : row + 1], group_size, zero_points)
        assert torch.equal(alone.values[0], whole.values[row])
        assert torch.equal(alone.scales[0], whole.scales[row])


@every_setting
def test_the_weight_is_left_as_it_was(name, group_size, zero_points):
    weight = torch.randn(7, 128)
    before = weight.clone()
    quantize(name, weight, group_size, zero_points)
    assert torch.equal(weight, before)


@every_setting
def test_zero_groups_and_values_too_small_for_a_scale(name, group_size, zero_points):
    weight = torch.zeros(4, 256)
    weight[1] = 1e-42
    weight[2, :128] = torch.randn(128)
    weight[3, 5] = -1e-45
    back = dequantize(name, quantize(name, weight, group_size, zero_points))
    assert torch.equal(back[[0, 1, 3]], torch.zeros(3, 256))
    assert torch.equal(back[2, 128:], torch.zeros(128))


@every_setting
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_refused_with_its_row(name, group_size, zero_points, bad):
    weight = torch.randn(1500, 300)
    weight[1234, 299] = bad
    with pytest.raises(ModelLoadError, match="row 1234 "):
        quantize(name, weight, group_size, zero_points)


def test_int4_refuses_what_its_scales_cannot_hold():
    with pytest.raises(ModelLoadError, match=r"row 0 .*too large"):
        quantize("int4", torch.full((1, 32), 1e6), 32, False)


def test_settings_that_a_scheme_does_not_have():
    weight = torch.randn(2, 64)
    for size in (0, 16, 63, 256):
        with pytest.raises(ConfigError, match=f"quantize_group_size must be one of 32, 64, 128 with int4, got {size}"):
            quantize("int4", weight, size, False)
    for chosen in ((None, True), (128, False)):
        with pytest.raises(ConfigError, match="int8 has one scale per output"):
            quantize("int8", weight, *chosen)
    for name in ("mxfp4", "nvfp4", "nf4"):
        for chosen in ((None, True), (128, False)):
            with pytest.raises(ConfigError, match=f"{name} has groups of"):
                quantize(name, weight, *chosen)
    with pytest.raises(
        ConfigError, match="'int3' is no quantization scheme; there are fp8, int4, int8, mxfp4, nf4, nvfp4"
    ):
        quantize("int3", weight, 128, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "int4", "group_size": 48}, "quantize_group_size must be one of 32, 64, 128 with int4, got 48"),
        ({"scheme": "int8", "zero_points": True}, "options of int4"),
        ({"scheme": "int8", "group_size": 128}, "options of int4"),
    ],
)
def test_a_configuration_with_options_that_its_scheme_lacks(options, words):
    with pytest.raises(ConfigError, match=words):
        quant.chosen_format(QuantizeConfig(**options))


@every_float
@given(weight=matrices())
@settings(max_examples=60, deadline=None)
def test_floats_are_the_nearest_of_16_by_their_scales(name, weight):
    """And a scale of the group's largest number makes no smaller error than the one that was taken."""
    quantized = quantize(name, weight, None, False)
    back, group = dequantize(name, quantized), quantized.group_size
    unit = quantize(name, weight, None, False).stored
    unit = as_tensor(quant.dequantize(replace(unit, packed=np.full_like(unit.codes, 2))))  # the scales: code 2 is 1
    levels = E2M1 * unit[:, :, None]
    nearest = (levels - weight[:, :, None]).abs().amin(2)
    torch.testing.assert_close((back - weight).abs(), nearest, rtol=1e-5, atol=1e-37)
    if name == "mxfp4":
        padded = F.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
        largest = padded.abs().amax(2, keepdim=True)
        usual = torch.exp2((largest.clamp(min=1e-30).log2().floor() - 2).clamp(min=-127))
        saturated = (padded / usual).clamp(-6, 6)
        usual_error = (E2M1 - saturated[..., None]).abs().amin(-1) * usual + (padded - saturated * usual).abs()
        error = F.pad(back - weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
        assert (error.square().sum(2) <= usual_error.square().sum(2) * 1.001 + 1e-30).all()


def test_floats_by_hand():
    """Ties go to the even code; a largest number of 7 is better held by the next power of two, 6.5 is not."""
    weight = torch.zeros(3, 32)
    weight[0, :9] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5])
    weight[1, :2], weight[2, :2] = torch.tensor([8.0, 7.9]), torch.tensor([6.5, 1.5])
    quantized = quantize("mxfp4", weight, None, False)
    assert quantized.values[0, :10].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 14, 0]
    assert quantized.scales.tolist() == [[1.0], [2.0], [1.0]]
    assert quantized.values[2, :2].tolist() == [7, 3]
    weight = torch.zeros(2, 32)
    weight[0, 0], weight[0, 16] = 2688.0, 3.0
    quantized = quantize("nvfp4", weight, None, False)
    assert quantized.scales.tolist() == [[448.0, 0.5], [0.0, 0.0]]
    assert quantized.stored.outer.tolist() == [[1.0], [0.0]]
    assert torch.equal(dequantize("nvfp4", quantized), weight)


@given(weight=matrices())
@settings(max_examples=60, deadline=None)
def test_fp8_is_torchs_by_the_largest_of_the_row(weight):
    quantized = quantize("fp8", weight, None, False)
    torch.testing.assert_close(quantized.scales, weight.abs().amax(1, keepdim=True) / 448, rtol=1e-6, atol=1.2e-38)
    by = torch.where(quantized.scales == 0, torch.inf, quantized.scales)
    wanted = (weight / by).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(quantized.values, wanted.view(torch.uint8))
    assert torch.equal(dequantize("fp8", quantized), wanted.float() * quantized.scales)


@given(weight=matrices())
@settings(max_examples=60, deadline=None)
def test_nf4_is_the_nearest_level_of_the_largest_in_the_block(weight):
    quantized = quantize("nf4", weight, None, False)
    largest = F.pad(weight, (0, -weight.shape[1] % 64)).unflatten(1, (-1, 64)).abs().amax(2)
    torch.testing.assert_close(quantized.scales, largest, rtol=0, atol=1.2e-38)
    levels = torch.from_numpy(STORED_LEVELS["nf4"]) * spread(largest, quantized)[:, :, None]
    nearest = (levels - weight[:, :, None]).abs().amin(2)
    error = (dequantize("nf4", quantized) - weight).abs()
    assert (error <= nearest + 1e-6 * spread(largest, quantized) + 1.2e-38).all()


def test_nf4_is_what_bitsandbytes_makes():
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(weight, quant_type="nf4")
    quantized = quantize("nf4", weight, None, False)
    assert torch.equal(torch.stack([packed >> 4, packed & 15], -1).reshape(64, 512), quantized.values)
    assert torch.equal(state.absmax.reshape(64, 8), quantized.scales)


def test_int8_by_hand():
    quantized = quantize("int8", torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5]]), None, False)
    assert quantized.scales.tolist() == [[1.0]]
    assert quantized.values.tolist() == [[255, 1, 128, 130, 130, 128]]  # halves to even


def test_int4_by_hand():
    """The largest magnitude is -8 steps, whatever its sign; the other sign ends at 7."""
    weight = torch.zeros(2, 32)
    weight[0, :4] = torch.tensor([-8.0, 7.6, 1.0, -0.5])
    weight[1, :4] = torch.tensor([16.0, -15.2, 2.0, 1.0])
    quantized = quantize("int4", weight, 32, False)
    assert quantized.scales.tolist() == [[1.0], [-2.0]]
    assert quantized.values[:, :5].tolist() == [[0, 15, 9, 8, 8], [0, 15, 7, 8, 8]]
    shifted = quantize("int4", torch.linspace(-3, 12, 16).repeat(2)[None], 32, True)
    assert (shifted.scales.tolist(), shifted.zero_points.tolist()) == ([[1.0]], [[3]])
    assert shifted.values[0, :16].tolist() == list(range(16))


def test_narrower_groups_and_zero_points_have_smaller_errors():
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))

    def error(name, group_size, zero_points):
        back = dequantize(name, quantize(name, weight, group_size, zero_points))
        return ((back - weight).square().mean() / weight.square().mean()).sqrt().item()

    errors = [error("int4", *chosen) for chosen in ((128, False), (64, False), (32, False), (32, True))]
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.11
    assert error("int8", None, False) < 0.01


def int8_in_torch(w):
    """The scheme's formula, once more."""
    scale = torch.maximum(w.amax(1, keepdim=True), -w.amin(1, keepdim=True)) / 127
    scale[scale < torch.finfo(torch.float32).tiny] = 0
    return ((w / torch.where(scale > 0, scale, torch.inf)).round() + 128).to(torch.uint8), scale, None


def int4_in_torch(w, group_size, zero_points):
    w_NGg = F.pad(w, (0, -w.shape[1] % group_size)).unflatten(1, (-1, group_size))
    low, high = w_NGg.amin(2, keepdim=True), w_NGg.amax(2, keepdim=True)
    if zero_points:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / 15
    else:
        scale = torch.where(high > -low, high, low) / -8
    scale = scale.half().float()
    divisor = torch.where(scale == 0, torch.inf, scale)
    zero = (-low / divisor).round().clamp(0, 15) if zero_points else torch.full_like(scale, 8)
    values = ((w_NGg / divisor).round() + zero).clamp(0, 15).to(torch.uint8).flatten(1)[:, : w.shape[1]]
    return values, scale[:, :, 0], zero[:, :, 0].to(torch.uint8) if zero_points else None


@every_integer
@given(weight=matrices())
@settings(max_examples=60, deadline=None)
def test_bits_are_those_of_the_same_formula_in_torch(name, group_size, zero_points, weight):
    expected = int8_in_torch(weight) if name == "int8" else int4_in_torch(weight, group_size, zero_points)
    quantized = quantize(name, weight, group_size, zero_points)
    for found, wanted in zip((quantized.values, quantized.scales, quantized.zero_points), expected):
        assert found is wanted or torch.equal(found, wanted)
