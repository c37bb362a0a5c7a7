"""Products with integer weights: every ISA level gives, bit for bit, what the rule in `expected` says.

The rule: inputs become integers per row and group, sums of a group are exact, and float32 enters only as
total += float32(sum) * scale, groups in ascending order. With minima a group adds (sum * scale + sum of inputs *
minimum) * scale of the inputs. Scales and minima of the super kinds are products of a byte and a float16, exact. 4-bit
floats count as twice what they are and the scale of the inputs as half; in nvfp4 a scale is an 8-bit float that counts
as a 256th, and the totals are multiplied, or divided, by a number of the output that is so much larger. nf4 and fp4
count as integers of 16 bits in a unit by which the inputs' scale is divided; nf4 with 16-bit inputs as 1024 * high +
low, which are two terms of a group.
"""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.quant.stored import LEVELS as STORED_LEVELS

native = pytest.importorskip("ridgeline._native", reason="the native module is not built")

PANEL = 32
LEVELS = native.runnable_levels()
SUPER = ["int8_super", "int8_super_minima", "int4_super_minima"]
FP4 = ["mxfp4", "nvfp4"]
TABLES = ["nf4", "fp4"]
KINDS = ["int8", "int8_groups", "int8_minima", "int4", "int4_minima", *SUPER, *FP4, *TABLES]
E4M3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # without sign
E4M3_UNIT = 256
UNITS = {"fp4": np.float32(192), "int8": np.float32(32168.5692), "int16": np.float32(1006995.375)}
PLANE = 1024
SUPER_INPUTS = 256
LIMITS = {"int16": 32767, "int8": 127}
# Shapes are drawn, and each runs at all levels.
property_test = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Layer:
    """Quantised weights: values [N, K] unsigned, scales [N, G], zero points [N, G] or None."""

    kind: str
    group: int
    values_NK: np.ndarray
    scales_NG: np.ndarray
    zero_points_NG: np.ndarray | None = None
    minima_NG: np.ndarray | None = None
    outer: tuple[np.ndarray, ...] = ()  # [N, S] of the scales, and of the minima, in the super kinds; [N, 1] in nvfp4

    @property
    def zeros_NG(self) -> np.ndarray:
        at_zero = {"int4": 8, "mxfp4": 0, "nvfp4": 0}
        default = np.full(self.scales_NG.shape, at_zero.get(self.kind, 0 if "minima" in self.kind else 128))
        return (default if self.zero_points_NG is None else self.zero_points_NG).astype(np.int64)

    @property
    def weight_groups(self) -> np.ndarray:
        """The index into scales and zero points of each input [K]."""
        num_inputs = self.values_NK.shape[1]
        return np.zeros(num_inputs, int) if self.kind == "int8" else np.arange(num_inputs) // self.group

    def factors_NK(self, input_kind: str) -> np.ndarray:
        """int64: what the codes of a table count as."""
        unit = float(UNITS["fp4" if self.kind == "fp4" else input_kind])
        return np.rint(STORED_LEVELS[self.kind].astype(np.float64) * unit).astype(np.int64)[self.values_NK]

    @property
    def centred_NK(self) -> np.ndarray:
        """int64: the values less their zeros; of 4-bit floats twice what the codes stand for."""
        if self.kind in FP4:
            return (2 * self.values_NK.view(ml_dtypes.float4_e2m1fn).astype(np.float64)).astype(np.int64)
        return self.values_NK - self.zeros_NG[:, self.weight_groups]

    def dequantised(self) -> np.ndarray:
        """float32 [N, K]."""
        if self.kind in TABLES:
            return STORED_LEVELS[self.kind][self.values_NK] * self.scales_NG[:, self.weight_groups]
        scales_NG, centred_NK = self.scales_NG, self.centred_NK.astype(np.float32)
        if self.kind in FP4:
            centred_NK /= 2
        if self.kind == "nvfp4":
            (outer,) = self.outer
            scales_NG = np.where(outer < 0, scales_NG / -outer, scales_NG * outer)
        scaled_NK = centred_NK * scales_NG[:, self.weight_groups]
        return scaled_NK if self.minima_NG is None else scaled_NK + self.minima_NG[:, self.weight_groups]

    @property
    def packed_scales(self) -> np.ndarray:
        """As `native.pack` takes them."""
        numbers = [self.scales_NG, *([] if self.minima_NG is None else [self.minima_NG])]
        if self.outer and self.kind in SUPER:
            numbers = [
                np.rint(n / by_group(outer, self.group, n)) for n, outer in zip(numbers, self.outer, strict=True)
            ]
        return np.concatenate([*numbers, *self.outer], axis=1).astype(np.float32)


def by_group(outer_NS: np.ndarray, group: int, like_NG: np.ndarray) -> np.ndarray:
    return np.repeat(outer_NS, SUPER_INPUTS // group, axis=1)[:, : like_NG.shape[1]]


def make_layer(
    kind: str, outputs: int, inputs: int, group: int = 256, zero_points: bool = False, seed: int = 0
) -> Layer:
    rng = np.random.default_rng(seed)
    num_scales = 1 if kind == "int8" else -(-inputs // group)
    values_NK = rng.integers(
        0, 16 if kind.startswith("int4") or kind in [*FP4, *TABLES] else 256, (outputs, inputs), dtype=np.uint8
    )
    scales_NG = np.exp(rng.normal(-4, 1, (outputs, num_scales))).astype(np.float32)
    if kind not in ("int8", *TABLES):
        scales_NG = scales_NG.astype(np.float16).astype(np.float32)
    zero_points_NG = rng.integers(0, 16, (outputs, num_scales), dtype=np.uint8) if zero_points else None
    minima_NG, outer = None, ()
    if kind == "mxfp4":
        scales_NG = np.exp2(rng.integers(-12, 4, scales_NG.shape)).astype(np.float32)
    if kind == "nvfp4":
        scales_NG = E4M3[rng.integers(0, len(E4M3), scales_NG.shape)]
        sign = np.where(rng.random((outputs, 1)) < 0.5, -1, 1)  # of those that divide
        outer = ((np.exp(rng.normal(-4, 1, (outputs, 1)) * sign) * sign).astype(np.float32),)
    if kind in SUPER:
        size = (outputs, -(-inputs // SUPER_INPUTS))
        outer = tuple(
            (np.exp(rng.normal(-8, 1, size)) * sign).astype(np.float16).astype(np.float32)
            for sign in ((1, -1) if "minima" in kind else (1,))
        )
        low = 0 if "minima" in kind else -128
        scales_NG, *others = (
            by_group(part, group, scales_NG) * rng.integers(low, 128, scales_NG.shape).astype(np.float32)
            for part in outer
        )
        minima_NG = others[0] if others else None
    if kind in ("int4_minima", "int8_minima"):
        minima_NG = -scales_NG * rng.normal(7.5, 2, scales_NG.shape).astype(np.float32)
        minima_NG = minima_NG.astype(np.float16).astype(np.float32)
    return Layer(kind, group, values_NK, scales_NG, zero_points_NG, minima_NG, outer)


def quantised(x_MK: np.ndarray, group: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers int64 [M, K] and scales float32 [M, G]."""
    num_groups = -(-x_MK.shape[1] // group)
    q_MK, scales_MG = np.zeros(x_MK.shape, np.int64), np.zeros((len(x_MK), num_groups), np.float32)
    for g in range(num_groups):
        part = x_MK[:, g * group : (g + 1) * group]
        with np.errstate(invalid="ignore", over="ignore"):
            scale_M = (np.abs(part).max(axis=1) / np.float32(limit)).astype(np.float32)
        finite_M = np.isfinite(part).all(axis=1)
        scale_M[finite_M & (scale_M < np.finfo(np.float32).tiny)] = 0
        scale_M[~finite_M] = np.nan
        used_M = scale_M > 0
        q_MK[used_M, g * group : (g + 1) * group] = np.rint(part[used_M] / scale_M[used_M, None]).astype(np.int64)
        scales_MG[:, g] = scale_M
    return q_MK, scales_MG


def expected(layer: Layer, x_MK: np.ndarray, input_kind: str) -> np.ndarray:
    """float32 [M, N] by the rule."""
    q_MK, input_scales_MG = quantised(x_MK, layer.group, LIMITS[input_kind])
    centred_NK, scales_NG = layer.centred_NK, layer.scales_NG
    if layer.kind in FP4:
        input_scales_MG = input_scales_MG / 2
    if layer.kind == "nvfp4":
        scales_NG = scales_NG / E4M3_UNIT
    total_MN = np.zeros((len(x_MK), len(layer.values_NK)), np.float32)
    for g in range(input_scales_MG.shape[1]):
        part = slice(g * layer.group, (g + 1) * layer.group)
        scale = input_scales_MG[:, g, None]
        if layer.kind in TABLES:
            two_planes = layer.kind == "nf4" and input_kind == "int16"
            factors_NK = layer.factors_NK(input_kind)[:, part]
            planes = [(factors_NK // PLANE, PLANE), (factors_NK % PLANE, 1)] if two_planes else [(factors_NK, 1)]
            scale = scale / UNITS["fp4" if layer.kind == "fp4" else input_kind]
            for plane_NK, by in planes:
                sums_MN = q_MK[:, part] @ plane_NK.T
                assert np.abs(sums_MN).max(initial=0) < 2**31
                total_MN += sums_MN.astype(np.float32) * (layer.scales_NG[None, :, g] * np.float32(by) * scale)
            continue
        sums_MN = q_MK[:, part] @ centred_NK[:, part].T
        assert np.abs(sums_MN).max(initial=0) < 2**31
        if layer.minima_NG is not None:
            minima_MN = q_MK[:, part].sum(axis=1, dtype=np.float32)[:, None] * layer.minima_NG[None, :, g]
            total_MN += (sums_MN.astype(np.float32) * layer.scales_NG[None, :, g] + minima_MN) * scale
            continue
        if layer.kind != "int8":
            scale = scale * scales_NG[None, :, g]
        total_MN += sums_MN.astype(np.float32) * scale
    if layer.kind == "nvfp4":
        by_N = layer.outer[0][:, 0]
        return np.where(by_N < 0, total_MN / (-by_N / E4M3_UNIT), total_MN * (by_N * E4M3_UNIT))
    return total_MN * layer.scales_NG[:, 0] if layer.kind == "int8" else total_MN


def aligned(num_bytes: int) -> np.ndarray:
    memory = np.full(num_bytes + 64, 0xA5, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:num_bytes]


@dataclass(frozen=True)
class Packed:
    matrix: object
    memory: np.ndarray  # keeps the bytes alive


def pack(
    layer: Layer, input_kind: str, level: str = "portable", order: np.ndarray | None = None, outputs: int | None = None
) -> Packed:
    outputs = outputs or len(layer.values_NK)
    matrix = native.Matrix(
        layer.kind, input_kind, outputs, layer.values_NK.shape[1], layer.group, layer.zero_points_NG is not None
    )
    memory = aligned(matrix.num_bytes)
    matrix = matrix.at(memory.ctypes.data)
    if order is None:
        order = np.full(matrix.num_panels * PANEL, -1)
        order[:outputs] = np.arange(outputs)
    middle = matrix.num_panels // 2
    for begin, end in [(0, middle), (middle, matrix.num_panels)]:
        native.pack(
            level,
            matrix,
            layer.values_NK,
            scales=layer.packed_scales,
            zero_points=layer.zero_points_NG,
            order=order,
            begin=begin,
            end=end,
        )
    return Packed(matrix, memory)


def multiply(packed: Packed, level: str, x_MK: np.ndarray, **options: object) -> np.ndarray:
    width = packed.matrix.num_panels * PANEL // (2 if options.get("epilogue") == "gate" else 1)
    out = np.zeros((len(x_MK), width), np.float32)
    native.multiply(level, packed.matrix, x_MK, out, **options)
    return out


def inputs_like(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    x = rng.normal(0, 1, (rows, width)) * np.exp(rng.normal(0, 3, (rows, 1)))
    x[rng.random((rows, width)) < 0.01] *= 50  # outliers, as activations have them
    return x.astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layer, np.ndarray, str]:
    kind = draw(st.sampled_from(KINDS))
    small = kind.startswith("int8_super") or kind == "nvfp4"
    group = draw(
        st.sampled_from([16, 32, 64, 128, 256] if small else [32, 64, *([] if kind in TABLES else [128, 256])])
    )
    outputs, inputs = draw(st.integers(1, 100)), draw(st.integers(1, 700))
    rows = draw(st.one_of(st.integers(1, 10), st.integers(11, 70), st.integers(125, 135)))
    seed = draw(st.integers(0, 2**32))
    layer = make_layer(kind, outputs, inputs, group, kind == "int4" and draw(st.booleans()), seed)
    x_MK = inputs_like(np.random.default_rng(seed), rows, inputs)
    return layer, x_MK, draw(st.sampled_from(["int16", "int8"]))


@property_test
@given(cases())
def test_every_level_gives_the_bits_of_the_rule(case: tuple[Layer, np.ndarray, str]) -> None:
    layer, x_MK, input_kind = case
    outputs = len(layer.values_NK)
    want = expected(layer, x_MK, input_kind)
    packed = pack(layer, input_kind)
    for level in LEVELS:
        got = multiply(packed, level, x_MK)
        np.testing.assert_array_equal(got[:, :outputs], want, err_msg=level)
        assert not got[:, outputs:].any(), level


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("input_kind", ["int16", "int8"])
def test_sixteen_bit_inputs_are_near_the_float_product_and_eight_bit_ones_nearer_than_their_step(
    kind: str, input_kind: str
) -> None:
    layer = make_layer(kind, 40, 520, 256 if kind == "int8" else 64)
    x_MK = inputs_like(np.random.default_rng(1), 9, 520)
    weight_NK = layer.dequantised().astype(np.float64)
    got = multiply(pack(layer, input_kind), native.best_level(), x_MK)[:, :40]
    largest_M = np.abs(x_MK).max(axis=1, keepdims=True).astype(np.float64)
    # Every input is off by at most half a step; the float32 sums add what rounding a few groups does.
    bound = 0.5 * largest_M / LIMITS[input_kind] * np.abs(weight_NK).sum(axis=1) * (1 + 1e-5)
    bound += 32 * 2.0**-24 * (np.abs(x_MK).astype(np.float64) @ np.abs(weight_NK).T)
    assert (np.abs(got - x_MK.astype(np.float64) @ weight_NK.T) <= bound).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("input_kind", ["int16", "int8"])
@pytest.mark.parametrize(
    ("kind", "group", "zero_point"),
    [
        ("int8", 32, None),
        ("int8", 64, None),
        ("int8", 256, None),
        ("int8_groups", 256, None),
        ("int4", 128, None),
        ("int4_minima", 32, None),
        ("int4_minima", 256, None),
        ("int8_super", 16, None),
        ("int8_super_minima", 256, None),
        ("int4_super_minima", 32, None),
        ("mxfp4", 32, None),
        ("nvfp4", 16, None),
        ("nvfp4", 256, None),
        ("nf4", 64, None),
        ("fp4", 64, None),
        *(("int4", group, zero) for group in (32, 64, 128) for zero in (0, 15, 255)),
    ],
)
@pytest.mark.parametrize("weight", ["least", "most", "mixed"])
def test_extreme_values_do_not_overflow(
    level: str, input_kind: str, kind: str, group: int, zero_point: int | None, weight: str
) -> None:
    most = (
        3 if kind == "fp4" else 7 if kind in FP4 else 15 if kind.startswith("int4") or kind == "nf4" else 255
    )  # 7: the largest float; 15 is its opposite
    layer = make_layer(kind, 33, 2 * group + 5, group, zero_point is not None)
    values_NK = {"least": layer.values_NK * 0, "most": layer.values_NK * 0 + most, "mixed": layer.values_NK}[weight]
    layer = replace(layer, values_NK=values_NK.astype(np.uint8))
    if zero_point is not None:
        layer = replace(layer, zero_points_NG=np.full_like(layer.zero_points_NG, zero_point))
    ones_K = np.ones(2 * group + 5, np.float32)
    signs_K = np.where(np.arange(len(ones_K)) % 2, np.float32(1), np.float32(-1))
    half_K = np.where(np.arange(len(ones_K)) % group < group // 2, np.float32(1), np.float32(-1))
    x_MK = np.stack([ones_K, -ones_K, signs_K, half_K, -half_K, ones_K * 1e30, ones_K * 1e-30])
    got = multiply(pack(layer, input_kind), level, x_MK)[:, :33]
    np.testing.assert_array_equal(got, expected(layer, x_MK, input_kind))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 21])
def test_rows_that_are_not_numbers_or_zero_stay_their_own(level: str, kind: str, rows: int) -> None:
    layer = make_layer(kind, 64, 300, 256 if kind == "int8" else 32)
    x_MK = inputs_like(np.random.default_rng(2), rows, 300)
    packed = pack(layer, "int16")
    clean = multiply(packed, level, x_MK)
    x_MK[0, 299], x_MK[2, 7] = np.nan, -np.inf
    x_MK[1] = 0
    got = multiply(packed, level, x_MK)
    assert np.isnan(got[[0, 2]]).all()
    assert (got[1] == 0).all()
    np.testing.assert_array_equal(got[3:], clean[3:])


@pytest.mark.parametrize("level", LEVELS)
def test_groups_too_small_for_a_normal_scale_count_as_zeros(level: str) -> None:
    layer = make_layer("int4", 32, 64, 32)
    x_MK = np.zeros((2, 64), np.float32)
    x_MK[0, :32], x_MK[0, 32:] = 1e-40, 1e-20
    x_MK[1] = x_MK[0] * np.float32(0)
    x_MK[1, 32:] = 1e-20
    got = multiply(pack(layer, "int16"), level, x_MK)
    assert got[0].any()
    np.testing.assert_array_equal(got[0], got[1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("input_kind", ["int16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_batch_or_on_how_panels_are_divided(
    level: str, input_kind: str, kind: str
) -> None:
    layer = make_layer(kind, 150, 400, 256 if kind == "int8" else 64, kind == "int4")
    x_MK = inputs_like(np.random.default_rng(3), 70, 400)
    packed = pack(layer, input_kind)
    whole = multiply(packed, level, x_MK)
    for rows in (*range(1, 20), 33, 64):
        np.testing.assert_array_equal(multiply(packed, level, x_MK[:rows]), whole[:rows])
    parts = np.zeros_like(whole)
    for begin, end in [(0, 1), (1, 4), (4, 4), (4, 5)]:
        native.multiply(level, packed.matrix, x_MK, parts, begin=begin, end=end, exact_batch=True)
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("kind", "group", "zero_points"),
    [
        ("int8", 256, False),
        ("int8_groups", 32, False),
        ("int4", 32, True),
        ("int4", 64, False),
        ("int4", 128, True),
        ("int4_minima", 32, False),
        ("int8_super", 16, False),
        ("int8_super_minima", 32, False),
        ("int4_super_minima", 32, False),
        ("mxfp4", 32, False),
        ("nvfp4", 16, False),
        ("nf4", 64, False),
        ("fp4", 32, False),
    ],
)
@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (64, 256), (70, 515)])
def test_unpacking_gives_the_weights_back_in_their_order(
    level: str, kind: str, group: int, zero_points: bool, shape: tuple[int, int]
) -> None:
    outputs, inputs = shape
    layer = make_layer(kind, outputs, inputs, group, zero_points)
    layer.scales_NG[0] = 2.0**-127 if kind == "mxfp4" else 0  # the least
    order = np.full(-(-outputs // PANEL) * PANEL, -1)
    order[: len(order)][np.random.default_rng(4).permutation(len(order))[:outputs]] = np.arange(outputs)
    packed = pack(layer, "int16", level, order)
    weight_NK = layer.dequantised()
    for n, row in enumerate(order):
        want = weight_NK[row] if row >= 0 else np.zeros(inputs, np.float32)
        np.testing.assert_array_equal(native.unpack_output(level, packed.matrix, n), want)
    np.testing.assert_array_equal(packed.memory, pack(layer, "int16", "portable", order).memory)


def test_a_matrix_of_some_inputs_has_no_whole_output() -> None:
    packed, order = pack(make_layer("int4", 32, 32, 32), "int16"), np.arange(2, 34, dtype=np.int32)
    some = native.Matrix("int4", "int16", 32, 32, 32, address=packed.memory.ctypes.data, order=order.ctypes.data)
    with pytest.raises(ValueError, match="some inputs of several"):
        native.unpack_output("portable", some, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_int4_scales_are_rounded_to_float16(level: str) -> None:
    every = np.arange(0, 2**15, 3, dtype=np.uint16).view(np.float16)
    scales = every[np.isfinite(every)].astype(np.float32)
    tie = (scales[:-1] + scales[1:]) / 2
    scales = np.concatenate([scales, tie, np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(1e9))])
    scales = np.concatenate([scales, [1e-38, 1e-42, 65519.9, 1e-7]]).astype(np.float32)[:, None]
    layer = Layer("int4", 32, np.full((len(scales), 2), 9, np.uint8), scales)
    packed = pack(layer, "int16", level)
    want = scales.astype(np.float16).astype(np.float32)
    got = np.stack([native.unpack_output(level, packed.matrix, n) for n in range(0, len(scales), 13)])
    np.testing.assert_array_equal(got, np.repeat(want[::13], 2, axis=1))
    x_MK = np.array([[1.0, 0.0]], np.float32)  # the vector conversion, over every value
    sum_and_scale = np.float32(32767) * (np.float32(1 / np.float32(32767)) * want[:, 0])
    np.testing.assert_array_equal(multiply(packed, level, x_MK)[0, : len(scales)], sum_and_scale)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_and_epilogues_are_applied(level: str, kind: str, rows: int, norm: str) -> None:
    rng = np.random.default_rng(5)
    inputs = 333
    layer = make_layer(kind, 64, inputs, 256 if kind == "int8" else 64)
    x_MK = inputs_like(rng, rows, inputs)
    weight_K, bias_K, bias_N = (rng.normal(0, 1, n).astype(np.float32) for n in (inputs, inputs, 64))
    wide = x_MK.astype(np.float64)
    if norm == "layer":
        wide = wide - wide.mean(axis=1, keepdims=True)
    wide = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight_K
    options = {"norm": norm, "eps": 1e-5, "norm_weight": weight_K, "bias": bias_N}
    if norm == "layer":
        wide, options = wide + bias_K, options | {"norm_bias": bias_K}
    dequantised = layer.dequantised().astype(np.float64)
    sums = wide @ dequantised.T + bias_N
    packed = pack(layer, "int16")
    step_M = np.abs(wide).max(axis=1, keepdims=True) / 32767
    bound = (0.5 * step_M + 1e-6 * np.abs(wide).max(axis=1, keepdims=True)) * np.abs(dequantised).sum(axis=1) + 1e-5
    assert (np.abs(multiply(packed, level, x_MK, **options) - sums) <= bound).all()
    gates = multiply(packed, level, x_MK, epilogue="gate", activation="relu", **options)
    panels = sums.reshape(rows, 2, 2, 16)
    want = (np.maximum(panels[:, :, 0], 0) * panels[:, :, 1]).reshape(rows, 32)
    parts, slack = np.abs(panels), bound.reshape(rows, 2, 2, 16)
    room = parts[:, :, 0] * slack[:, :, 1] + parts[:, :, 1] * slack[:, :, 0] + slack[:, :, 0] * slack[:, :, 1]
    assert (np.abs(gates - want) <= room.reshape(rows, 32) * 1.01).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(70, 128, 32), (96, 200, 64), (33, 8, 128)])
def test_words_of_eight_codes_become_the_panels_that_codes_become(level, zero_points, outputs, inputs, group):
    """Whatever the order of the outputs, also from rows of words that lie apart or at odd addresses."""
    layer = make_layer("int4", outputs, inputs, group, zero_points)
    shifts = np.arange(8, dtype=np.uint32) * np.uint32(4)
    lanes_SEN = layer.values_NK.T.reshape(-1, 8, outputs).astype(np.uint32) << shifts[:, None]
    words_SN = np.ascontiguousarray(np.bitwise_or.reduce(lanes_SEN, axis=1))
    apart = np.zeros((len(words_SN), outputs + 5), np.uint32)[:, 3:-2]
    odd = np.zeros(words_SN.nbytes + 2, np.uint8)[2:].view(np.uint32).reshape(words_SN.shape)
    panels = -(-outputs // PANEL)
    rows = np.full(panels * PANEL, -1)
    rows[:outputs] = np.arange(outputs)
    shuffled = np.random.default_rng(0).permutation(rows)
    halves = np.concatenate([rows.reshape(-1, 16)[::2], rows.reshape(-1, 16)[1::2]]).flatten()
    for order in (rows, shuffled, halves):
        wanted = pack(layer, "int16", level, order)
        for words in (words_SN, apart, odd):
            words[...] = words_SN
            memory = aligned(wanted.matrix.num_bytes)
            matrix = wanted.matrix.at(memory.ctypes.data)
            beside = {"scales": layer.packed_scales, "zero_points": layer.zero_points_NG, "order": order}
            for begin in range(panels):
                native.pack_words(level, matrix, words, **beside, begin=begin, end=begin + 1)
            assert np.array_equal(memory, wanted.memory)
    with pytest.raises(ValueError, match="words has shape"):
        native.pack_words(level, matrix, words_SN[:-1], **beside, begin=0, end=panels)
    with pytest.raises(ValueError, match="words of a row follow one another"):
        native.pack_words(level, matrix, np.repeat(words_SN, 2, 1)[:, ::2], **beside, begin=0, end=panels)
