"""Stored matrices are packed few rows at a time: the same bits whatever runs as one, and little in memory."""

import tracemalloc

import numpy as np
import pytest
from quantized_folder import LLAMA, change
from small_checkpoint import described
from test_gptq import gptq

from ridgeline import quant
from ridgeline.backends.native.settings import prequantized_formats
from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import prequantized

native = pytest.importorskip("ridgeline._native", reason="the native module is not built")

from ridgeline.backends.native.weights import PANEL, PANELS_PER_TASK, NativeWeights, interleaved  # noqa: E402

# No source begins or ends where a part does.
WIDE = LLAMA | {"num_hidden_layers": 1, "head_dim": 96, "intermediate_size": 1312}
QKV = [f"layers.0.attn.{letter}.weight" for letter in "qkv"]
GATE_UP = ["layers.0.ffn.gate.weight", "layers.0.ffn.up.weight"]


def opened(folder, config, num_threads=2):
    """(how to read the stored matrices, what packs them, how they are packed)"""
    spec, program = described(config)
    stored = prequantized(ModelFolder.open(folder), spec, program)
    formats = prequantized_formats(stored.formats, program, "int16", "float32")
    return stored, NativeWeights(dict, native.best_level(), num_threads, None, stored), formats


@pytest.mark.parametrize("names", [QKV, GATE_UP], ids=["one below the other", "side by side"])
@pytest.mark.parametrize("case", [{}, {"sym": False}, {"bits": 3, "sym": False}, {"bits": 8}], ids=str)
def test_parts_are_the_whole(tmp_path, names, case):
    gptq(tmp_path, WIDE, **case)
    stored, weights, formats = opened(tmp_path, WIDE)
    expected = np.concatenate([quant.dequantize(stored.matrix(name)) for name in names])
    assert len(expected) > 2 * PANEL * PANELS_PER_TASK
    is_pair = names is GATE_UP
    order = interleaved(len(expected) // 2) if is_pair else np.arange(len(expected))
    form = formats.get(names[0])
    if form is None:
        pytest.skip("no kernel has it")
    matrix = weights.matrix("both", names, expected.shape, form, interleave=is_pair)
    found = np.stack([native.unpack_output(native.best_level(), matrix, n) for n in range(len(order))])
    np.testing.assert_array_equal(found[order >= 0], expected[order[order >= 0]])
    assert not found[order < 0].any()


def test_packing_takes_memory_for_little_at_a_time(tmp_path):
    config = LLAMA | {"num_hidden_layers": 1, "intermediate_size": 8192}
    gptq(tmp_path, config)
    _, weights, formats = opened(tmp_path, config, num_threads=1)
    tracemalloc.start()
    weights.matrix("both", GATE_UP, (2 * 8192, 128), formats[GATE_UP[0]], interleave=True)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 * 8192 * 128 / 2, "half of the codes, a byte each"


def test_zeros_that_differ_in_a_later_part_are_refused(tmp_path):
    gptq(tmp_path, WIDE)

    def spoilt(zeros_GW):
        zeros_GW[0, -1] ^= 1
        return zeros_GW

    change(tmp_path, "model.layers.0.mlp.up_proj.qzeros", spoilt)
    _, weights, formats = opened(tmp_path, WIDE)
    with pytest.raises(ModelLoadError, match="qzeros differ, but quantization_config says sym=true"):
        weights.matrix("both", GATE_UP, (2624, 128), formats[GATE_UP[0]], interleave=True)
