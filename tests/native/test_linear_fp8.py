"""Products with 8-bit float weights: those of the float product at every ISA level, near enough for float32 sums."""

import ml_dtypes
import numpy as np
import pytest

native = pytest.importorskip("ridgeline._native", reason="the native module is not built")

PANEL = 32
LEVELS = native.runnable_levels()
SUM = 64 * 2.0**-24  # of float32 sums, as a share of the magnitudes


def make(level: str, inputs_as: str, inputs: int, group: int, outputs: int = 70):
    """Return a packed matrix, its memory, and its weights [N, K] by the formula; every code is among them."""
    rng = np.random.default_rng(inputs + group)
    codes_NK = rng.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    codes_NK.reshape(-1)[:256] = np.arange(min(256, codes_NK.size))
    codes_NK[(codes_NK & 127) == 127] = 0  # NaN is refused before
    scales_NG = np.exp(rng.normal(-4, 1, (outputs, -(-inputs // group) if group else 1))).astype(np.float32)
    matrix = native.Matrix("e4m3", inputs_as, outputs, inputs, group)
    memory = np.full(matrix.num_bytes + 64, 0xA5, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: matrix.num_bytes]
    matrix = matrix.at(memory.ctypes.data)
    order = np.full(matrix.num_panels * PANEL, -1)
    order[:outputs] = np.arange(outputs)
    native.pack(level, matrix, codes_NK, scales_NG, None, order, 0, matrix.num_panels)
    levels_NK = codes_NK.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return matrix, memory, levels_NK * np.repeat(scales_NG, group or inputs, axis=1)[:, :inputs]


def product(level: str, matrix, x_MK: np.ndarray) -> np.ndarray:
    out = np.zeros((len(x_MK), matrix.num_panels * PANEL), np.float32)
    native.multiply(level, matrix, x_MK, out, exact_batch=True)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inputs_as", ["f32", "bf16"])
@pytest.mark.parametrize("inputs", [1, 128, 205, 300, 1024])
@pytest.mark.parametrize("group", [0, 32, 96, 128])
def test_it_is_the_product_with_the_formulas_weights(level: str, inputs_as: str, inputs: int, group: int) -> None:
    matrix, memory, weight_NK = make(level, inputs_as, inputs, group)
    for n, weight_K in enumerate(weight_NK):
        np.testing.assert_array_equal(native.unpack_output(level, matrix, n), weight_K)
    np.testing.assert_array_equal(memory, make("portable", inputs_as, inputs, group)[1])
    x_MK = np.random.default_rng(1).normal(0, 1, (40, inputs)).astype(np.float32)
    used_MK = x_MK.astype(ml_dtypes.bfloat16).astype(np.float32) if inputs_as == "bf16" else x_MK
    wanted = used_MK.astype(np.float64) @ weight_NK.T
    bound = SUM * (np.abs(used_MK).astype(np.float64) @ np.abs(weight_NK).T)
    whole = product(level, matrix, x_MK)
    assert (np.abs(whole[:, : len(weight_NK)] - wanted) <= bound).all()
    assert not whole[:, len(weight_NK) :].any()
    for rows in (1, 2, 3, 7, 13):  # a row's bits are its own
        np.testing.assert_array_equal(product(level, matrix, x_MK[:rows]), whole[:rows])


def test_groups_and_inputs_that_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="multiple of 32 inputs, or 0"):
        native.Matrix("e4m3", "bf16", 32, 128, 40)
    with pytest.raises(ValueError, match="takes inputs of f32 or bf16, not int8"):
        native.Matrix("e4m3", "int8", 32, 128, 0)
