"""AWQ folders: bit for bit the format's formula, integers that stay integers natively, and clear refusals."""

import json

import numpy as np
import pytest
from quantized_folder import EXAMPLE, LLAMA, PHI3, change, check_bits, check_logits, loads_or_refuses, store
from small_checkpoint import described

from ridgeline import quant
from ridgeline.core.dtypes import BFLOAT16
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import prequantized

OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map
# By AutoAWQ 0.2.7: dequantize_gemm of these words, zeros and scales in groups of two inputs.
GOLDEN_WORDS = np.array([[0x76543210], [0x0FEDCBA9], [-0x12345678], [0x13579BDF]], np.int32)
GOLDEN_ZEROS = np.array([[0x13243546], [0x7654ABCD]], np.int32)
GOLDEN_SCALES = np.array([[0.5, 1, 2, 3, 4, 5, 6, 7], [1, 1, 1, 1, 0.25, 0.25, 0.25, 0.25]], np.float16)
GOLDEN = [
    [-3, 0, -6, 9, -12, 15, 0, 42],
    [1.5, 9, 12, 36, 24, 60, 54, -7],
    [-5, 7, -4, 7, -0.5, 1.75, 0, 1.75],
    [2, 3, 1, 0, 0, -0.75, -0.25, -1.5],
]


def pack(integers_XN):
    """Along the outputs into words, by the definition, one integer after the other."""
    words = np.zeros((integers_XN.shape[0], integers_XN.shape[1] // 8), np.uint32)
    for nibble, output in enumerate(OUTPUT_OF_NIBBLE):
        words |= integers_XN[:, output::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def awq(folder, config=LLAMA, *, group=32, points=True, scales=np.float16, changed=()):
    rng = np.random.default_rng(group + points)

    def quantize(layer, weight):
        num_outputs, num_inputs = weight.shape
        groups = np.arange(num_inputs) // (group if group > 0 else num_inputs)
        q_KN = rng.integers(0, 16, (num_inputs, num_outputs))
        shape = (groups[-1] + 1, num_outputs)
        z_GN = rng.integers(0, 16, shape) if points else np.full(shape, 8)
        s_GN = (rng.random(z_GN.shape) / 128 + 0.001).astype(np.float32).astype(scales)
        tensors = {f"{layer}.qweight": pack(q_KN), f"{layer}.scales": s_GN}
        if points:
            tensors[f"{layer}.qzeros"] = pack(z_GN)
        return tensors, ((q_KN - z_GN[groups]).astype(np.float32) * s_GN.astype(np.float32)[groups]).T

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": points, "version": "gemm"}
    return store(folder, settings | dict(changed), quantize, config)


@pytest.mark.parametrize(
    "case",
    [{"group": 128}, {"group": 32}, {"group": -1}, {"group": 64, "points": False}, {"scales": np.dtype(BFLOAT16)}],
    ids=str,
)
def test_bits_are_those_of_the_formula_and_stay(tmp_path, case):
    form = check_bits(tmp_path, awq(tmp_path, **case))
    assert (form.bits, form.zero, form.scale) == (4, "points" if case.get("points", True) else "fixed", "float16")
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    check_logits(tmp_path, stays=True)


def test_a_tensor_of_several_weights_is_cut_into_their_rows(tmp_path):
    fused = awq(tmp_path, PHI3)["model.layers.1.self_attn.qkv_proj"]
    stored = prequantized(ModelFolder.open(tmp_path), *described(PHI3))
    cut = [quant.dequantize(stored.matrix(f"layers.1.attn.{letter}.weight")) for letter in "qkv"]
    assert np.array_equal(np.concatenate(cut), fused)


def test_the_order_within_a_word_is_autoawqs():
    """What AutoAWQ unpacks from words whose nibbles all differ."""
    from ridgeline.weights.formats.awq import _outputs

    assert _outputs(GOLDEN_WORDS[:1], slice(None))[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    codes_NK, zeros_NG = _outputs(GOLDEN_WORDS, slice(None)), _outputs(GOLDEN_ZEROS, slice(None))
    values = (codes_NK.astype(np.float32) - np.repeat(zeros_NG, 2, axis=1)) * np.repeat(GOLDEN_SCALES.T, 2, axis=1)
    np.testing.assert_array_equal(values.T, GOLDEN)


def test_scales_that_float16_cannot_hold_are_decoded(tmp_path):
    expected = awq(tmp_path, scales=np.float32)
    assert check_bits(tmp_path, expected).scale == "float32"
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    assert "14 are dequantized to float32: float16 cannot hold its scales" in check_logits(tmp_path, stays=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_refused(tmp_path, bad):
    awq(tmp_path)
    change(tmp_path, f"{EXAMPLE}.scales", lambda x: np.where(np.arange(x.shape[1]) == 3, bad, x).astype(x.dtype))
    assert not loads_or_refuses(tmp_path)


def test_settings_as_other_writers_have_them(tmp_path):
    """GPTQModel repeats the version in keys of its own; AutoAWQ's first versions wrote quant_config.json instead."""
    own = {"method": "awq", "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32", "meta": {"mse": 0.0}}
    check_bits(tmp_path, awq(tmp_path, changed=own))
    expected = awq(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(settings))
    check_bits(tmp_path, expected)
