"""GPTQ folders: bit for bit the format's formula, integers that stay integers natively, and clear refusals."""

import numpy as np
import pytest
from quantized_folder import EXAMPLE, LLAMA, PHI3, change, check_bits, check_logits, load, store
from safetensors.numpy import save_file
from small_checkpoint import described

from ridgeline import quant
from ridgeline.backends.native.settings import prequantized_formats
from ridgeline.core.dtypes import BFLOAT16, FLOAT32
from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import StreamedWeights, load_weights, prequantized


def pack(integers_XY, bits):
    """Along the first dimension into words, bit by bit, by the definition: integer j at bits j * bits and following."""
    spread = (integers_XY[:, None] >> np.arange(bits)[:, None] & 1).reshape(-1, 32, integers_XY.shape[1])
    return (spread.astype(np.uint64) << np.arange(32, dtype=np.uint64)[:, None]).sum(1).astype(np.uint32).view(np.int32)


def gptq(folder, config=LLAMA, *, bits=4, group=32, sym=True, version=1, scales=np.float16, order=None, changed=()):
    """Writes a model whose layers are random GPTQ matrices; returns what those are, by the formula, one by one.

    `order` "shuffled" is desc_act, "zero" and "none" are spellings of an unused g_idx.
    """
    rng = np.random.default_rng(bits + group)

    def quantize(layer, weight):
        num_outputs, num_inputs = weight.shape
        groups = np.arange(num_inputs) // (num_inputs if group == -1 else group)
        if order == "shuffled":
            groups = rng.permutation(groups)
        q_KN = rng.integers(0, 1 << bits, (num_inputs, num_outputs))
        z_GN = rng.integers(0, 1 << bits, (groups.max() + 1, num_outputs))
        if sym:
            z_GN[:] = 1 << (bits - 1)
        s_GN = (rng.random(z_GN.shape) / (1 << bits) / 8 + 1e-3).astype(np.float32).astype(scales)
        stored_zeros = (z_GN - 1) % (1 << bits) if version == 1 else z_GN
        tensors = {
            f"{layer}.qweight": pack(q_KN, bits),
            f"{layer}.qzeros": pack(stored_zeros.T, bits).T,
            f"{layer}.scales": s_GN,
            f"{layer}.g_idx": {"zero": 0 * groups, "none": 0 * groups - 1}.get(order, groups).astype(np.int32),
        }
        return tensors, ((q_KN - z_GN[groups]).astype(np.float32) * s_GN.astype(np.float32)[groups]).T

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": order == "shuffled"}
    settings |= {"checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}
    return store(folder, settings | dict(changed), quantize, config)


CASES = [
    {"bits": 4, "group": 32},
    {"bits": 4, "group": 64, "version": 2},
    {"bits": 4, "group": 64, "version": 2, "changed": {"checkpoint_format": "gptq"}},  # a header that lies
    {"bits": 4, "group": 128, "sym": False},
    {"bits": 4, "group": 32, "sym": False, "version": 2},
    {"bits": 4, "group": -1, "order": "zero"},
    {"bits": 4, "group": -1, "sym": False, "order": "none"},
    {"bits": 8, "group": 32},
    {"bits": 8, "group": 128, "sym": False},
    {"bits": 8, "group": -1, "version": 2},
    {"bits": 4, "group": 32, "scales": np.dtype(BFLOAT16)},
    {"bits": 2, "group": 32},
    {"bits": 2, "group": 64, "sym": False},
    {"bits": 3, "group": 32},
    {"bits": 3, "group": 128, "sym": False, "version": 2},
    {"bits": 4, "group": 32, "sym": False, "order": "shuffled"},
    {"bits": 3, "group": 64, "order": "shuffled"},
    {"bits": 4, "group": 16},
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def reason(case):
    """Why such matrices are decoded natively."""
    if case["bits"] == 8 and not case.get("sym", True):
        return "no kernel has 8 bits with zero points"
    return "no kernel has groups of 16 inputs" if case["group"] == 16 else ""


@every_case
def test_bits_are_those_of_the_formula(tmp_path, case):
    form = check_bits(tmp_path, gptq(tmp_path, **case))
    assert form.zero == ("fixed" if case.get("sym", True) else "points")


def test_a_tensor_of_several_weights_is_cut_into_their_rows(tmp_path):
    expected, (spec, program) = gptq(tmp_path, PHI3), described(PHI3)
    stored, fused = (
        prequantized(ModelFolder.open(tmp_path), spec, program),
        expected["model.layers.1.self_attn.qkv_proj"],
    )
    cut = [quant.dequantize(stored.matrix(f"layers.1.attn.{letter}.weight")) for letter in "qkv"]
    assert np.array_equal(np.concatenate(cut), fused)
    streamed = StreamedWeights(tmp_path, spec, program, FLOAT32)
    assert np.array_equal(streamed.rows("layers.1.attn.k.weight", slice(5, 40)), fused[128 + 5 : 128 + 40])


@every_case
def test_native_computes_with_the_integers(tmp_path, case):
    """The reference computes with what they mean, in float32; what is decoded says why."""
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    gptq(tmp_path, **case)
    assert reason(case) in check_logits(tmp_path, stays=not reason(case))


def test_one_order_of_inputs_serves_what_runs_as_one_matrix(tmp_path):
    """As writers make it: queries, keys and values read one input, whose order is that of its importance."""
    native = pytest.importorskip("ridgeline._native", reason="the native module is not built")
    gptq(tmp_path, PHI3, order="shuffled", sym=False)
    check_logits(tmp_path, stays=True)
    spec, program = described(PHI3)
    stored = prequantized(ModelFolder.open(tmp_path), spec, program)
    formats = prequantized_formats(stored.formats, program, "int16", "float32")
    names = [f"layers.1.attn.{letter}.weight" for letter in "qkv"]
    assert len({formats[name] for name in names}) == 1 and formats[names[0]].order
    from ridgeline.backends.native.weights import NativeWeights

    weights = NativeWeights(dict, native.best_level(), 1, None, stored)
    expected = np.concatenate([quant.dequantize(stored.matrix(name)) for name in names])
    matrix = weights.matrix("qkv", names, expected.shape, formats[names[0]])
    found = np.stack([native.unpack_output(native.best_level(), matrix, n) for n in range(len(expected))])
    assert np.array_equal(found, expected)


def test_native_computes_with_rows_of_fused_tensors(tmp_path):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    gptq(tmp_path, PHI3, sym=False)
    check_logits(tmp_path, stays=True)


def test_rules_for_single_layers(tmp_path):
    """The first rule whose pattern begins a layer's name counts; others take the defaults."""
    late, rules = {".*self": {"bits": 8}, ".*": {"bits": 4}}, {r"+:model\.layers\.[01]\.mlp": {"bits": 8}}
    expected = gptq(tmp_path, bits=8, changed={"bits": 4, "dynamic": rules | late})
    check_bits(tmp_path, expected)
    gptq(tmp_path, bits=8, changed={"bits": 4, "dynamic": late | rules})
    with pytest.raises(ModelLoadError, match="GPTQ of 4 bits"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def test_a_bias_of_zeros_that_the_model_has_not(tmp_path):
    """AutoGPTQ wrote one for every layer; another number is no such bias."""
    expected, name = gptq(tmp_path), f"{EXAMPLE}.bias"
    save_file(load(tmp_path) | {name: np.zeros(128, np.float16)}, tmp_path / "model.safetensors")
    check_bits(tmp_path, expected)
    change(tmp_path, name, lambda x: x + np.float16(1))
    with pytest.raises(ModelLoadError, match=rf"1 unexpected: {name}"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    gptq(tmp_path)
    change(tmp_path, f"{EXAMPLE}.scales", lambda x: np.full_like(x, np.inf))
    stored = prequantized(ModelFolder.open(tmp_path), *described(LLAMA))
    with pytest.raises(ModelLoadError, match=rf"{EXAMPLE}\.weight': a scale is NaN or infinite"):
        stored.matrix("layers.1.ffn.down.weight")
