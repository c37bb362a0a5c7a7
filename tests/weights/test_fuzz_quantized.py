"""Mutated folders of every format load or are refused by a typed error; benchmarks/fuzz_quantized.py runs thousands."""

import pytest
from benchmarks.fuzz_quantized import fuzz
from quantized_folder import LLAMA
from test_awq import awq
from test_gptq import gptq
from test_more_formats import eight_bits, four_bits, mlx, modelopt

SMALL = LLAMA | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 1}


def compressed(folder, form, **args):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from test_compressed_tensors import compressed

    compressed(folder, form, SMALL, **args)


MAKERS = {
    "awq": lambda folder: awq(folder, SMALL),
    "gptq": lambda folder: gptq(folder, SMALL, sym=False, order="shuffled"),
    "modelopt": lambda folder: modelopt(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, SMALL),
    "bitsandbytes-4": lambda folder: four_bits(folder, config=SMALL),
    "bitsandbytes-8": lambda folder: eight_bits(folder),
    "mlx": lambda folder: mlx(folder, config=SMALL),
    "pack": lambda folder: compressed(
        folder, "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "int": lambda folder: compressed(folder, "int-quantized", num_bits=8, strategy="channel"),
    "block": lambda folder: compressed(
        folder, "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 32]
    ),
    "nvfp4": lambda folder: compressed(
        folder, "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_mutations(tmp_path, name):
    MAKERS[name](tmp_path)
    counts = fuzz(tmp_path, num_files=25, seed=1)
    assert counts["refused"] > 8
