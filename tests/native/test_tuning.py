"""Variants of the matrix products: which there are, and that integers give the same bits under all of them."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from ridgeline import _native
from ridgeline.backends.native.memory import address, allocate

PANEL = 32
INTEGERS = (
    ("int8", 256, False),
    ("int8_groups", 32, False),
    ("int4", 128, True),
    ("int4", 32, False),
    ("int4_minima", 64, False),
    ("mxfp4", 32, False),
    ("nvfp4", 16, False),
    ("nf4", 64, False),
)
ROWS = (1, 2, 3, 4, 7, 16, 33, 70)
FAMILIES = ("amd", "zen5", "intel", "other")
Variants = Mapping[str, str]


def packed(
    level: str, kind: str, inputs_as: str, outputs: int, inputs: int, group: int, points: bool
) -> tuple[_native.Matrix, np.ndarray]:
    """Return a packed matrix of random weights, and its memory."""
    random = np.random.default_rng(0)
    empty = _native.Matrix(kind, inputs_as, outputs, inputs, group, points)
    memory = allocate(empty.num_bytes + 16384)  # what is fetched ahead is never read
    matrix = empty.at(address(memory))
    num_groups = 1 if kind == "int8" else -(-inputs // max(group, 1))
    scales = zeros = None
    if kind in ("f32", "bf16"):
        rows = random.standard_normal((outputs, inputs)).astype(np.float32)
        if kind == "bf16":
            rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    else:
        rows = random.integers(0, 256 if kind.startswith("int8") else 16, (outputs, inputs), dtype=np.uint8)
        width = {"int4_minima": 2 * num_groups, "nvfp4": num_groups + 1}.get(kind, num_groups)
        scales = random.uniform(0.01, 0.1, (outputs, width)).astype(np.float32)
        zeros = random.integers(0, 16, (outputs, num_groups), dtype=np.uint8) if points else None
    order = np.full(matrix.num_panels * PANEL, -1, dtype=np.int64)
    order[:outputs] = np.arange(outputs)
    _native.pack(level, matrix, rows, scales, zeros, order, 0, matrix.num_panels)
    return matrix, memory


def combinations(level: str, matrix: _native.Matrix) -> Iterator[Variants]:
    """Yield every combination of a variant of each choice."""
    names: dict[str, list[str]] = {}
    for choice, name in _native.variants_of(level, matrix):
        names.setdefault(choice, []).append(name)
    for values in itertools.product(*names.values()):
        yield dict(zip(names, values))


def product(level: str, matrix: _native.Matrix, x: np.ndarray, **options: int) -> np.ndarray:
    out = np.full((len(x), matrix.num_panels * PANEL), np.nan, dtype=np.float32)
    _native.multiply(level, matrix, x, out, **options)
    return out


@pytest.mark.parametrize("inputs_as", ["int16", "int8"])
@pytest.mark.parametrize(("kind", "group", "points"), INTEGERS)
def test_integer_variants_are_equal_bit_for_bit(kind: str, group: int, points: bool, inputs_as: str) -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((max(ROWS), 600)).astype(np.float32)
    expected: dict[int, np.ndarray] = {}
    for level in _native.runnable_levels():
        matrix, _memory = packed(level, kind, inputs_as, 7 * PANEL - 5, 600, group, points)
        for variants in combinations(level, matrix):
            tuned = _native.tuned(level, matrix, variants)
            for rows in ROWS:
                out = product(level, tuned, x[:rows])
                np.testing.assert_array_equal(out, expected.setdefault(rows, out), err_msg=f"{level} {variants} {rows}")


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_float_variants_differ_by_their_product_alone(kind: str) -> None:
    random = np.random.default_rng(2)
    x = random.standard_normal((max(ROWS), 600)).astype(np.float32)
    for level in _native.runnable_levels():
        matrix, _memory = packed(level, kind, kind, 7 * PANEL - 5, 600, 0, False)
        expected: dict[tuple[str, int], np.ndarray] = {}
        for variants in combinations(level, matrix):
            tuned = _native.tuned(level, matrix, variants)
            for rows in ROWS:
                out = product(level, tuned, x[:rows])
                same = expected.setdefault((variants.get("product", ""), rows), out)
                np.testing.assert_array_equal(out, same, err_msg=f"{level} {variants} {rows}")


def test_panels_may_be_divided_anywhere_under_every_variant() -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((2, 256)).astype(np.float32)
    for level in _native.runnable_levels():
        for kind, inputs_as, group in (("int4", "int8", 32), ("int8", "int16", 256), ("bf16", "bf16", 0)):
            matrix, _memory = packed(level, kind, inputs_as, 11 * PANEL, 256, group, False)
            for variants in combinations(level, matrix):
                tuned = _native.tuned(level, matrix, variants)
                whole = product(level, tuned, x)
                for begin, end in ((0, 1), (1, 6), (3, 11), (10, 11)):
                    part = product(level, tuned, x, begin=begin, end=end)
                    inside = slice(begin * PANEL, end * PANEL)
                    np.testing.assert_array_equal(part[:, inside], whole[:, inside])
                    assert np.isnan(np.delete(part, np.r_[inside], axis=1)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_a_variant_of_every_choice(family: str) -> None:
    for level in _native.runnable_levels():
        for kind, inputs_as, group in (
            ("f32", "f32", 0),
            ("bf16", "bf16", 0),
            ("int8", "int8", 256),
            ("int4", "int16", 32),
        ):
            matrix = _native.Matrix(kind, inputs_as, 64, 64, group)
            there = _native.variants_of(level, matrix)
            defaults = _native.default_variants(level, matrix, family)
            assert set(defaults.items()) <= set(there)
            assert set(defaults) == {choice for choice, _ in there}


def test_a_variant_that_is_not_there_is_named_with_those_that_are() -> None:
    matrix = _native.Matrix("int4", "int8", 64, 64, 32)
    with pytest.raises(ValueError, match="no variant stream=9x1 at level portable; there is stream=1x384"):
        _native.tuned("portable", matrix, {"stream": "9x1"})
    with pytest.raises(ValueError, match="a family of CPUs is amd, zen5, intel or other, not 'arm'"):
        _native.default_variants("portable", matrix, "arm")


def test_this_cpu_has_a_family() -> None:
    assert _native.cpu_family() in FAMILIES
