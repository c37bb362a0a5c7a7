"""Products with float32 and bfloat16 weights, at every ISA level, against float64 on the same numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("ridgeline._native", reason="the native module is not built")

LEVELS = native.runnable_levels()
KINDS = ["f32", "bf16"]
EPS = {"f32": 2.0**-24, "bf16": 2.0**-24}


def bf16_bits(x):
    """float32 as bfloat16 bits, round to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Packed:
    """A packed matrix and the memory that holds it; `w_NK` is what it holds, in float64, in the packed order."""

    def __init__(self, level, kind, w_NK, order=None):
        rows = w_NK.astype(np.float32) if kind == "f32" else bf16_bits(w_NK)
        exact = (rows if kind == "f32" else from_bits(rows)).astype(np.float64)
        num_outputs, num_inputs = w_NK.shape
        outputs = num_outputs if order is None else len(order)
        matrix = native.Matrix(kind, kind, outputs, num_inputs)
        full = np.full(32 * matrix.num_panels, -1, np.int64)
        full[:outputs] = np.arange(outputs) if order is None else order
        self.memory = np.full(matrix.num_bytes + 64, 0xFF, np.uint8)
        self.matrix = matrix.at(-(-self.memory.ctypes.data // 64) * 64)
        self.order, self.rows, self.level, self.kind = full, rows, level, kind
        native.pack(level, self.matrix, rows, None, None, full, 0, matrix.num_panels)
        self.w_NK = np.where(full[:, None] < 0, 0.0, exact[full])

    def inputs(self, x):
        """What the kernel multiplies by, in float64."""
        return (x if self.kind == "f32" else from_bits(bf16_bits(x))).astype(np.float64)

    def multiply(self, x, out=None, epilogue="store", **options):
        width = (16 if epilogue == "gate" else 32) * self.matrix.num_panels
        out = np.full((len(x), width), 7.0, np.float32) if out is None else out
        native.multiply(self.level, self.matrix, x, out, epilogue=epilogue, **options)
        return out

    def bound(self, x):
        """The largest error of float32 sums of K products, with slack for the order of additions."""
        magnitudes = np.abs(self.inputs(x)) @ np.abs(self.w_NK).T
        return (self.matrix.inputs + 2) * EPS[self.kind] * magnitudes + 1e-30


def random_product(seed, level, kind, m, n, k):
    rng = np.random.default_rng(seed)
    packed = Packed(level, kind, rng.standard_normal((n, k)) / np.sqrt(k))
    return packed, rng.standard_normal((m, k)).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 140),
    k=st.integers(1, 200),
    exact_batch=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_product_is_within_rounding_of_float64(level, kind, m, n, k, exact_batch, seed):
    packed, x = random_product(seed, level, kind, m, n, k)
    y = packed.multiply(x, exact_batch=exact_batch)
    assert (np.abs(y - packed.inputs(x) @ packed.w_NK.T) <= packed.bound(x)).all()
    assert (y[:, n:] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [*range(1, 34), 47, 48, 64, 65, 70])
def test_every_number_of_rows(level, kind, m):
    packed, x = random_product(m, level, kind, m, 70, 100)
    y = packed.multiply(x)
    assert (np.abs(y - packed.inputs(x) @ packed.w_NK.T) <= packed.bound(x)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_any_batch_and_division(level, kind):
    packed, x = random_product(1, level, kind, 70, 300, 130)
    alone = np.concatenate([packed.multiply(row[None], exact_batch=True) for row in x])
    for m in [1, 2, 3, 4, 5, 8, 12, 13, 16, 25, 32, 33, 70]:
        assert (packed.multiply(x[:m], exact_batch=True) == alone[:m]).all(), m
        assert (packed.multiply(x[70 - m :], exact_batch=True) == alone[70 - m :]).all(), m
    for m in [1, 2, 7, 40]:
        for cuts in ([0, 10], [0, 1, 10], [0, 3, 5, 9, 10], range(11)):
            out = np.full((m, 320), 7.0, np.float32)
            for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
                packed.multiply(x[:m], out, begin=begin, end=end, exact_batch=True)
            assert (out == alone[:m]).all(), (m, cuts)


@pytest.mark.skipif(not {"amx", "amx_emulated"} <= set(LEVELS), reason="needs AMX, or scripts/tile_trap")
@pytest.mark.parametrize("m", [5, 16, 17, 33, 70])
def test_tiles_in_memory_give_the_bits_of_the_matrix_unit(m):
    products = [random_product(m, level, "bf16", m, 70, 130) for level in ("amx", "amx_emulated")]
    real, emulated = (packed.multiply(x) for packed, x in products)
    np.testing.assert_array_equal(real, emulated)


@pytest.mark.parametrize("level", LEVELS)
def test_panels_outside_the_range_are_left_alone(level):
    packed, x = random_product(2, level, "bf16", 9, 160, 64)
    out = np.full((9, 160), 7.0, np.float32)
    packed.multiply(x, out, begin=2, end=4)
    assert (out[:, :64] == 7).all() and (out[:, 128:] == 7).all() and (out[:, 64:128] != 7).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 100), k=st.integers(1, 100), seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=25, deadline=None)
def test_unpacking_gives_back_every_bit(level, kind, n, k, seed, data):
    rng = np.random.default_rng(seed)
    order = data.draw(st.lists(st.integers(-1, n - 1), min_size=1, max_size=70))
    packed = Packed(level, kind, rng.standard_normal((n, k)), order)
    for output, row in enumerate(packed.order):
        expected = np.zeros(k, np.float32) if row < 0 else packed.rows[row]
        expected = from_bits(expected) if row >= 0 and kind == "bf16" else expected
        assert (native.unpack_output(level, packed.matrix, output) == expected).all()


def test_levels_pack_alike():
    rng = np.random.default_rng(3)
    for kind in KINDS:
        w = rng.standard_normal((45, 77))
        packs = [Packed(level, kind, w) for level in LEVELS]
        rows = [[native.unpack_output(LEVELS[0], p.matrix, i) for i in range(45)] for p in packs]
        assert all((np.array(r) == np.array(rows[0])).all() for r in rows)


def test_packing_part_by_part_equals_packing_at_once():
    rng = np.random.default_rng(4)
    whole = Packed(LEVELS[0], "bf16", rng.standard_normal((130, 50)))
    bytes_before = whole.memory.copy()
    whole.memory[:] = 0xFF
    for begin in range(whole.matrix.num_panels):
        native.pack(whole.level, whole.matrix, whole.rows, None, None, whole.order, begin, begin + 1)
    assert (whole.memory == bytes_before).all()


def silu(v):
    return v / (1 + np.exp(-v))


ACTIVATIONS = {"silu": silu, "relu": lambda v: np.maximum(v, 0)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 3, 13, 40])
def test_epilogues(level, kind, m):
    packed, x = random_product(5, level, kind, m, 96, 160)
    bias = np.random.default_rng(6).standard_normal(96).astype(np.float32)
    y = packed.inputs(x) @ packed.w_NK.T + bias
    slack = packed.bound(x) + 4e-7 * np.abs(y)
    assert (np.abs(packed.multiply(x, bias=bias) - y) <= slack).all()
    assert (np.abs(packed.multiply(x, epilogue="add", bias=bias) - (y + 7)) <= slack + 1e-6).all()
    capped = packed.multiply(x, bias=bias, softcap=2.0)
    assert (np.abs(capped - 2 * np.tanh(y / 2)) <= slack + 1e-6).all()
    for name, act in ACTIVATIONS.items():
        acted = packed.multiply(x, epilogue="activate", activation=name, bias=bias)
        assert (np.abs(acted - act(y)) <= 1.2 * slack + 1e-6).all()
    gated = packed.multiply(x, epilogue="gate", bias=bias)
    gate, up = y.reshape(m, 3, 2, 16).transpose(2, 0, 1, 3)
    size = slack.reshape(m, 3, 2, 16).max(axis=2)
    limit = size * (1.2 * np.abs(up) + np.abs(silu(gate)) + size) + 1e-6 * (1 + np.abs(silu(gate) * up))
    assert (np.abs(gated.reshape(m, 3, 16) - silu(gate) * up) <= limit).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("k", [1, 31, 32, 33, 100, 256])
def test_rows_are_normalised_on_the_way_in(level, kind, norm, k):
    packed, x = random_product(7, level, kind, 6, 40, k)
    weight, bias = np.random.default_rng(8).standard_normal((2, k)).astype(np.float32)
    wide = x.astype(np.float64)
    centred = wide - (wide.mean(1, keepdims=True) if norm == "layer" else 0)
    scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-3) * weight
    h = scaled + (bias if norm == "layer" else 0)
    options = {"norm": norm, "eps": 1e-3, "norm_weight": weight, "norm_bias": bias if norm == "layer" else None}
    y = packed.multiply(x, **options)
    # A normalised value may round to the neighbouring bfloat16.
    input_error = (2.0**-8 if kind == "bf16" else 1e-6) * np.abs(h) + 1e-5 * (np.abs(weight) + np.abs(bias))
    bound = input_error @ np.abs(packed.w_NK).T + 1.1 * (k + 2) * 2.0**-24 * (np.abs(h) @ np.abs(packed.w_NK).T)
    assert (np.abs(y - h @ packed.w_NK.T) <= bound).all()


@pytest.mark.parametrize("level", LEVELS)
def test_rows_may_be_chosen_by_index(level):
    packed, x = random_product(11, level, "bf16", 20, 64, 96)
    index = np.array([7, 0, 19, 7], np.int64)
    out = packed.multiply(x, np.zeros((4, 64), np.float32), index=index, exact_batch=True)
    assert (out == packed.multiply(x, exact_batch=True)[index]).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", [33, 128])
def test_a_bad_row_spoils_only_itself(level, kind, bad, k):
    packed, x = random_product(9, level, kind, 40, 64, k)
    clean = packed.multiply(x)
    x[17, k - 1] = bad
    y = packed.multiply(x)
    others = np.arange(40) != 17
    assert (y[others] == clean[others]).all()
    assert not np.isfinite(y[17]).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_denormals_count_as_themselves_or_as_zero(level, kind):
    packed = Packed(level, kind, np.full((32, 64), 2.0**-130))
    x = np.full((20, 64), 2.0**100, np.float32)
    y = packed.multiply(x)
    exact = packed.inputs(x) @ packed.w_NK.T
    assert (np.isclose(y, exact, rtol=1e-5, atol=0) | (y == 0)).all()


def test_wrong_arrays_are_refused():
    level = LEVELS[0]
    packed, x = random_product(10, level, "bf16", 3, 32, 64)
    matrix, out = packed.matrix, np.zeros((3, 32), np.float32)
    with pytest.raises(ValueError, match=r"x has shape \[3, 63\], expected \[3, 64\]"):
        native.multiply(level, matrix, np.ascontiguousarray(x[:, 1:]), out)
    with pytest.raises(ValueError, match="out has shape"):
        native.multiply(level, matrix, x, np.zeros((3, 31), np.float32))
    with pytest.raises(ValueError, match=r"panels \[0, 2\)"):
        native.multiply(level, matrix, x, out, end=2)
    with pytest.raises(TypeError):
        native.multiply(level, matrix, x.astype(np.float64), out)
    with pytest.raises(ValueError, match="dtype"):
        native.pack(level, matrix, packed.rows.astype(np.float32), None, None, packed.order, 0, 1)
    with pytest.raises(ValueError, match="order names row 32 of 32"):
        native.pack(level, matrix, packed.rows, None, None, packed.order + 1, 0, 1)
    with pytest.raises(ValueError, match="no memory yet"):
        native.multiply(level, native.Matrix("bf16", "bf16", 32, 64), x, out)
    with pytest.raises(ValueError, match="does not run here"):
        native.multiply("sse9", matrix, x, out)
