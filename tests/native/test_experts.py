"""Routing and experts on the tape against the reference functions, and against the products of single rows."""

import numpy as np
import pytest
import torch

pytest.importorskip("ridgeline._native", reason="the native module is not built")
from native_steps import step_batch

from ridgeline import _native
from ridgeline.backends.native.settings import MatrixFormat
from ridgeline.backends.native.weights import NativeWeights, interleaved
from ridgeline.backends.reference.interpreter import REFERENCE_OPS
from ridgeline.backends.reference.tensors import as_array, as_arrays, as_tensor
from ridgeline.program.ops.experts import ExpertsAttrs, RouteAttrs
from ridgeline.quant import dequantize, quantize
from ridgeline.spec.spec import ClampedSwiGlu, Routing

LEVELS = _native.runnable_levels()
FORMS = {
    "f32": MatrixFormat(kind="f32", inputs="f32"),
    "bf16": MatrixFormat(kind="bf16", inputs="bf16"),
    "int8": MatrixFormat(kind="int8", inputs="int16"),
    "int8 by int8": MatrixFormat(kind="int8", inputs="int8"),
    "int4": MatrixFormat(kind="int4", inputs="int16", group=32),
    "int4 with zero points": MatrixFormat(kind="int4", inputs="int16", group=64, zero_points=True),
}
ERRORS = {"f32": 1e-6, "bf16": 2e-2, "int8 by int8": 4e-2}  # of the largest entry; 16-bit inputs lose next to nothing
ATTRS = {
    "silu": ExpertsAttrs("silu"),
    "gelu_tanh": ExpertsAttrs("gelu_tanh"),
    "clamped": ExpertsAttrs(ClampedSwiGlu(limit=0.7, alpha=1.702)),
}


class RowTape:
    """A tape whose first buffers hold given rows: tokens look them up in tables."""

    def __init__(self, level, threads=2, deterministic=True):
        self.pool = _native.Pool(threads)
        self.tape = _native.Tape(level, self.pool, deterministic)
        self._tables = []

    def rows(self, values) -> int:
        table = np.ascontiguousarray(values, dtype=np.float32)
        self._tables.append(table)
        buffer = self.tape.buffer("tokens", table.shape[1])
        self.tape.embed_rows(table.ctypes.data, "f32", "tokens", 1.0, buffer)
        return buffer

    def run(self, token_ids) -> None:
        ids = np.asarray(token_ids, dtype=np.int64)
        block = step_batch(token_ids_T=ids, positions_T=ids).block
        self.tape.run(block, np.zeros((0, 32), dtype=np.float32), 0, len(self.tape))
        self._count = len(ids)

    def read(self, buffer, width) -> np.ndarray:
        return self.tape.view(buffer, self._count)[:, :width].copy()


class Layer:
    """Random experts in a format, as packed matrices and as what the reference computes with."""

    def __init__(self, seed, form, shape, bias):
        self.count, self.size, self.width = shape
        self.form = form
        generator = torch.Generator().manual_seed(seed)

        def noise(*dims):
            return torch.randn(dims, generator=generator)

        gate, up = (noise(self.count, self.size, self.width) / self.width**0.5 for _ in range(2))
        down = noise(self.count, self.width, self.size) / self.size**0.5
        self.biases = [noise(self.count, n) for n in (self.size, self.size, self.width)] if bias else []
        tensors = {"gate": gate, "up": up, "down": down}
        self.exact = [self._stored(tensor) for tensor in tensors.values()]
        self._packed = NativeWeights(lambda: as_arrays(tensors), "portable", 1, None, None)
        shapes = {"gate+up": (2 * self.size, self.width), "down": (self.width, self.size)}
        self.gate_up, self.down = (
            self._packed.matrix(name, name.split("+"), shape, form, interleave="+" in name, num_experts=self.count)
            for name, shape in shapes.items()
        )
        self.addresses = [0, 0]
        if bias:
            joined, order = torch.cat(self.biases[:2], dim=1), torch.from_numpy(interleaved(self.size))
            padded = torch.nn.functional.pad(self.biases[2], (0, -self.width % 32))
            both = torch.where(order >= 0, joined[:, order.clamp(min=0)], 0.0)
            self.addresses = [
                self._packed.vector("b1", lambda: as_array(both)),
                self._packed.vector("b2", lambda: as_array(padded)),
            ]

    def _stored(self, weight):
        if self.form.kind in ("int8", "int4"):
            quantized = quantize(self.form.kind, as_array(weight.flatten(0, 1)), self.form.stored_format)
            return as_tensor(dequantize(quantized)).view_as(weight)
        return weight.bfloat16().float() if self.form.kind == "bf16" else weight

    def reference(self, attrs, x, ids, weights):
        inputs = [torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights)]
        return REFERENCE_OPS["experts"](attrs, inputs, [*self.exact, *self.biases], None)[0].numpy()

    def native(self, attrs, x, ids, weights, level, order=None, **options):
        """Rows of the result; a step of the tokens `order`, all of them unless given."""
        tape = RowTape(level, **options)
        rows, chosen, counts = tape.rows(x), tape.rows(ids), tape.rows(weights)
        out = tape.tape.buffer("tokens", self.width)
        act = attrs.activation
        function = ("silu", act.limit, act.alpha) if isinstance(act, ClampedSwiGlu) else (act, 0.0, 1.0)
        tape.tape.experts(self.count, self.gate_up, self.down, rows, chosen, counts, out, *function, *self.addresses)
        tape.run(range(len(x)) if order is None else order)
        return tape.read(out, self.width)


def choices(rng, pattern, tokens, count, top_k):
    """Ids and weights [T, k] where experts are chosen at random, all alike, or in two crowds."""
    if pattern == "alike":
        ids = np.tile(rng.permutation(count)[:top_k], (tokens, 1))
    else:
        near = count if pattern == "random" else max(top_k, count // 2)
        ids = np.stack([rng.permutation(near)[:top_k] for _ in range(tokens)])
    return ids.astype(np.float32), rng.random((tokens, top_k), dtype=np.float32)


#        experts, size, width   top_k  tokens  pattern
SHAPES = [
    ((1, 1, 1), 1, 1, "random"),
    ((3, 7, 5), 3, 4, "random"),  # every expert
    ((8, 40, 33), 2, 1, "random"),
    ((6, 48, 70), 1, 37, "alike"),  # one expert for all, and five for none
    ((9, 70, 130), 4, 23, "crowd"),
    ((5, 33, 96), 2, 130, "random"),
]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_experts_are_those_of_the_reference(level, form, bias):
    rng = np.random.default_rng(3)
    for seed, (shape, top_k, tokens, pattern) in enumerate(SHAPES):
        attrs = list(ATTRS.values())[seed % len(ATTRS)]
        layer = Layer(seed, FORMS[form], shape, bias)
        x = rng.standard_normal((tokens, shape[2]), dtype=np.float32)
        ids, weights = choices(rng, pattern, tokens, shape[0], top_k)
        expected = layer.reference(attrs, x, ids, weights)
        actual = layer.native(attrs, x, ids, weights, level, deterministic=False)
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        assert error <= ERRORS.get(form, 2e-4), (shape, pattern)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_token_does_not_depend_on_the_others_or_on_the_threads(level, form):
    """Bitwise, and its experts' results are those of one row through the linear kernels."""
    rng = np.random.default_rng(5)
    layer, attrs, top_k, tokens = Layer(1, FORMS[form], (7, 41, 70), False), ATTRS["silu"], 3, 29
    x = rng.standard_normal((tokens, layer.width), dtype=np.float32)
    ids, weights = choices(rng, "crowd", tokens, layer.count, top_k)
    whole = layer.native(attrs, x, ids, weights, level, threads=3)
    for order in ([4], [28, 4], [4, 7, 7, 28, 0, 13, 21]):
        assert np.array_equal(layer.native(attrs, x, ids, weights, level, order, threads=2), whole[order])
    assert np.array_equal(layer.native(attrs, x, ids, weights, level, [4], threads=1), whole[[4]])

    total = np.zeros(layer.width, dtype=np.float32)
    for expert, weight in zip(ids[4].astype(int), weights[4]):
        hidden = np.zeros((1, 16 * layer.gate_up.num_panels), dtype=np.float32)
        matrix = layer.gate_up.at(layer.gate_up.address + expert * layer.gate_up.num_bytes)
        _native.multiply(level, matrix, x[4:5], hidden, epilogue="gate", activation="silu", exact_batch=True)
        result = np.zeros((1, 32 * layer.down.num_panels), dtype=np.float32)
        matrix = layer.down.at(layer.down.address + expert * layer.down.num_bytes)
        _native.multiply(level, matrix, hidden[:, : layer.size].copy(), result, exact_batch=True)
        total += weight * result[0, : layer.width]
    assert np.abs(total - whole[4]).max() <= 4 * np.finfo(np.float32).eps * np.abs(total).max()


def test_experts_that_nobody_chose_are_not_read():
    """Their weights are NaN, and so is every neighbour of the ones that were chosen."""
    layer = Layer(1, FORMS["f32"], (6, 20, 40), False)
    whole = Layer(1, FORMS["f32"], (6, 20, 40), False)
    for part, matrix in layer._packed._parts.items():
        for expert in (0, 1, 3, 5):
            each = matrix.nbytes // 6
            matrix[expert * each : (expert + 1) * each] = 0xFF
        assert "gate+up" in part or "down" in part
    x = np.random.default_rng(1).standard_normal((9, 40), dtype=np.float32)
    ids = np.tile(np.float32([4, 2]), (9, 1))
    weights = np.full((9, 2), 0.5, dtype=np.float32)
    for order in ([3], range(9)):
        actual = layer.native(ATTRS["silu"], x, ids, weights, LEVELS[-1], order)
        assert np.array_equal(actual, whole.native(ATTRS["silu"], x, ids, weights, LEVELS[-1], order))


ROUTES = [  # and the number of experts
    (Routing(1, "softmax", False), 1),
    (Routing(8, "softmax", True), 60),
    (Routing(2, "softmax", True, scale=2.5), 2),
    (Routing(3, "softmax", False, num_groups=4, top_groups=2), 16),
    (Routing(6, "sigmoid", True, scale=2.5, num_groups=4, top_groups=2, group_score="top2_sum"), 12),
    (Routing(5, "sigmoid", False, num_groups=5, top_groups=5, group_score="top2_sum"), 40),
]


def native_route(routing, logits, bias, threads=2):
    tape = RowTape("portable", threads)
    rows = tape.rows(logits)
    ids, weights = (tape.tape.buffer("tokens", routing.top_k) for _ in range(2))
    tape.tape.route(rows, ids, weights, routing.scoring, routing.normalize, routing.scale, routing.num_groups,
                    routing.top_groups, routing.group_score, 0 if bias is None else bias.ctypes.data)  # fmt: skip
    tape.run(range(len(logits)))
    return tape.read(ids, routing.top_k), tape.read(weights, routing.top_k)


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("routing", "count"), ROUTES)
def test_routes_are_those_of_the_reference(routing, count, biased):
    """Half the rows have ties, which go to the lower number."""
    rng = np.random.default_rng(7)
    logits = (2 * rng.standard_normal((50, count))).astype(np.float32)
    logits[25:] = np.round(logits[25:])
    bias = np.round(rng.standard_normal(count), 1).astype(np.float32) if biased else None
    inputs, weights = [torch.from_numpy(logits)], [torch.from_numpy(bias)] if biased else []
    expected = [out.numpy() for out in REFERENCE_OPS["route"](RouteAttrs(routing), inputs, weights, None)]
    ids, counts = native_route(routing, logits, bias)
    assert np.array_equal(ids, expected[0])
    assert np.allclose(counts, expected[1], rtol=2e-6, atol=0)


@pytest.mark.parametrize(("routing", "count"), ROUTES)
def test_every_route_is_to_different_experts(routing, count):
    """Also where logits or the bias are no numbers: what is read by these numbers must be there."""
    logits = np.zeros((4, count), dtype=np.float32)
    logits[1], logits[2, ::2], logits[3] = np.nan, np.nan, np.inf
    for bias in (None, np.full(count, np.nan, dtype=np.float32), np.full(count, -np.inf, dtype=np.float32)):
        ids, _ = native_route(routing, logits, bias)
        assert ((ids >= 0) & (ids < count)).all()
        assert all(len(set(row)) == routing.top_k for row in ids)


def test_rows_are_gated():
    rng = np.random.default_rng(2)
    x, gate = rng.standard_normal((5, 37), dtype=np.float32), 4 * rng.standard_normal((5, 1), dtype=np.float32)
    tape = RowTape("portable")
    rows, gates, out = tape.rows(x), tape.rows(gate), tape.tape.buffer("tokens", 37)
    tape.tape.gate_rows(rows, gates, out)
    tape.run(range(5))
    expected = REFERENCE_OPS["gate_rows"](None, [torch.from_numpy(x), torch.from_numpy(gate)], [], None)[0]
    assert np.allclose(tape.read(out, 37), expected.numpy(), rtol=1e-6)


def test_experts_that_do_not_fit_are_refused():
    layer, tape = Layer(1, FORMS["f32"], (3, 8, 16), False), RowTape("portable")
    x, ids, weights = (tape.tape.buffer("tokens", width) for width in (16, 2, 2))
    out, narrow = tape.tape.buffer("tokens", 16), tape.tape.buffer("tokens", 8)
    for arguments in ((1, layer.gate_up, layer.down, x, ids, weights, out),
                      (3, layer.gate_up, layer.down, narrow, ids, weights, out),
                      (3, layer.gate_up, layer.down, x, ids, weights, narrow)):  # fmt: skip
        with pytest.raises(ValueError, match=r"than there are|do not fit"):
            tape.tape.experts(*arguments, "silu")
    with pytest.raises(ValueError, match="groups do not fit"):
        tape.tape.route(x, ids, weights, "softmax", True, 1.0, num_groups=3, top_groups=1)
