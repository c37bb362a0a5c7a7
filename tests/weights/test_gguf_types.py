"""Every tensor type against the `gguf` package: what it quantizes, and any bytes at all."""

import gguf
import numpy as np
import pytest

from ridgeline.weights.gguf.types import TYPES

IN_BLOCKS = {number: kind for number, kind in TYPES.items() if kind.block > 1}


def oracle(number):
    return gguf.GGMLQuantizationType(number)


@pytest.mark.parametrize("number", TYPES)
def test_names_and_sizes(number):
    kind = TYPES[number]
    assert kind.name == oracle(number).name
    assert (kind.block, kind.block_bytes) == gguf.GGML_QUANT_SIZES[oracle(number)]
    assert kind.num_bytes((3, 5, 2 * kind.block)) == 30 * kind.block_bytes


def test_the_types_that_are_promised():
    promised = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
    promised += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
    promised += ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"]
    assert sorted(kind.name for kind in TYPES.values()) == sorted(promised)


@pytest.mark.parametrize("number", IN_BLOCKS, ids=lambda number: TYPES[number].name)
def test_any_bytes(number):
    kind = TYPES[number]
    rng = np.random.default_rng(number)
    data = rng.integers(0, 256, (700, 3 * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, oracle(number))
    finite = np.isfinite(expected).all(axis=1)
    assert finite.sum() > 100
    found = kind.dequantize(data[finite].reshape(-1), expected[finite].shape)
    np.testing.assert_array_equal(found.view(np.uint32), expected[finite].view(np.uint32))
    if not finite.all():
        with pytest.raises(ValueError, match="a scale is NaN, infinite or too large"):
            kind.dequantize(data.reshape(-1), expected.shape)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])  # those that the package writes
def test_round_trips(name):
    number = gguf.GGMLQuantizationType[name].value
    values = np.random.default_rng(7).normal(0, 0.1, (64, 96)).astype(np.float32)
    data = gguf.quantize(values, oracle(number))
    found = TYPES[number].dequantize(data.reshape(-1), values.shape)
    np.testing.assert_array_equal(found, gguf.dequantize(data, oracle(number)))
    step = np.abs(values).reshape(-1, 32).max(axis=1) / {"Q8": 127, "Q4": 7, "Q5": 15, "MX": 3}[name[:2]]
    assert (np.abs(found - values).reshape(-1, 32) <= 1.01 * step[:, None] + 1e-3).all()
