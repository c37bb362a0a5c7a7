"""Which weights of a model are quantized, and what the others are after a round trip."""

import re

import pytest
import torch

from families import tiny
from ridgeline import quant
from ridgeline.backends.reference.tensors import as_arrays, as_tensors
from ridgeline.program.lower import lower
from ridgeline.spec import families

NOT_QUANTIZED = re.compile(
    r"((unused_)?positions|types)\.weight|.*\.router\.weight|.*\.conv\w*\.weight|.*_norm\.weight"
)


def tiny_program(name, pick):
    return lower(families.read_spec(tiny(name, pick)))


def first(*options):
    return options[0]


def last(*options):
    return options[-1]


def test_every_matrix_and_no_vector():
    for name in families.names():
        for pick in (first, last):
            program = tiny_program(name, pick)
            chosen = quant.quantized_names(program, embeddings=True)
            matrices = {key for key, shape in program.weights.items() if len(shape) > 1 and key.endswith(".weight")}
            assert chosen == {key for key in matrices if not NOT_QUANTIZED.fullmatch(key)}


def test_without_embeddings_table_and_head_stay():
    for pick in (first, last):
        program = tiny_program("qwen3", pick)
        both = quant.quantized_names(program, embeddings=True)
        assert both - quant.quantized_names(program, embeddings=False) == {"embed.weight", "head.weight"} & both


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe"])
def test_round_trip_of_a_model(name):
    program = tiny_program(name, first)
    generator = torch.Generator().manual_seed(0)
    weights = {key: torch.randn(shape, generator=generator) for key, shape in program.weights.items()}

    form = quant.scheme("int4").stored_format(32, True)

    def round_trip(weights):
        return as_tensors(quant.dequantized_weights(program, as_arrays(weights), "int4", form, embeddings=True))

    after = round_trip(weights)
    chosen = quant.quantized_names(program, embeddings=True)
    assert after.keys() == weights.keys()
    for key, weight in weights.items():
        assert torch.equal(after[key], weight) == (key not in chosen)
        assert (after[key].dtype, after[key].shape) == (weight.dtype, weight.shape)
        again = round_trip(after)[key]
        assert (again - after[key]).abs().max() <= 2e-3 * after[key].abs().max()
