"""Timings of the native backend: every op of the program once, in order, with what its weights take in memory."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ridgeline._native", reason="the native module is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
from native_steps import BF16, CONTEXT, F32, layout_of, native, step
from tiny_models import build

from ridgeline.backends.native.emit import EMITTERS
from ridgeline.backends.native.executable import NativeExecutable
from ridgeline.backends.native.settings import MatrixFormat, NativeSettings
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.cost.account import weight_bytes
from ridgeline.cost.roofline import costs_of
from ridgeline.program.opset import OPSET
from ridgeline.program.pricing import Load

INT4 = MatrixFormat(kind="int4", inputs="int16", group=32)
W4A8 = MatrixFormat(kind="int4", inputs="int8", group=32)
INT8 = MatrixFormat(kind="int8", inputs="int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build("qwen3", 1, tmp_path_factory.mktemp("qwen3"))


def timings_of(executable, model):
    ids = np.random.default_rng(5).integers(0, model.spec.vocab_size, CONTEXT - 2)
    return executable.timed(step(model.lowered(CONTEXT), [(0, 0, ids)]))[1]


def test_every_op_is_timed_once(model):
    program = model.lowered(CONTEXT)
    for kinds in (
        EMITTERS,
        {kind: EMITTERS[kind] for kind in EMITTERS if kind == "norm_head" or kind in OPSET},
    ):
        settings = NativeSettings(level="portable", num_threads=2, dtype="float32", matrices=F32, head=F32, kv="f32")
        executable = NativeExecutable(
            program, lambda: as_arrays(model.weights), layout_of(program), settings, native=kinds
        )
        *timings, sample = timings_of(executable, model)
        timed = [name for timing in timings for name in timing.ops]
        assert len(timed) == len(set(timed))
        untimed = {op.kind for op in program.ops if op.label not in timed}
        assert untimed <= {"split_heads"}, "a view takes no instruction"
        assert (sample.kind, sample.ops) == ("sample", ())
        assert all(timing.seconds > 0 for timing in (*timings, sample))


@pytest.mark.parametrize(
    ("settings", "weights", "inputs", "kv", "products"),
    [
        ({}, (4, 4), ("f32", "f32"), 4, "f32"),
        ({"dtype": "bfloat16", "matrices": BF16, "head": BF16, "kv": "bf16"}, (2, 2), ("bf16", "bf16"), 2, "bf16"),
        ({"matrices": INT4, "head": INT8, "kv": "int8"}, (0.5 + 2 / 32, 1), ("int16", "int8"), 1, "int16"),
        ({"matrices": W4A8, "head": INT8, "kv": "int8"}, (0.5 + 2 / 32, 1), ("int4", "int8"), 1, "int16"),
    ],
)
def test_formats_are_priced(model, settings, weights, inputs, kv, products):
    program = model.lowered(CONTEXT)
    given = (
        {name: weight.bfloat16() for name, weight in model.weights.items()} if "dtype" in settings else model.weights
    )
    by_kind = {timing.kind: timing for timing in timings_of(native(program, given, "portable", **settings), model)}
    gate, head = by_kind["norm_gated"], by_kind["norm_head"]
    assert (gate.inputs, head.inputs) == inputs
    assert gate.element.weight == pytest.approx(weights[0])
    assert weights[1] <= head.element.weight < weights[1] + 0.5, "with its share of an int8 scale"
    assert kv <= by_kind["attention"].element.kv < kv + 1
    assert by_kind["attention"].inputs == products


def test_the_bytes_of_a_step_are_those_of_all_weights(model):
    """All but the token table, of which a step reads its rows only; a head that shares it is read whole."""
    program = model.lowered(CONTEXT)
    timings = timings_of(native(program, model.weights, "portable"), model)
    costs = costs_of(program, [(t.ops, t.element) for t in timings], Load(((CONTEXT - 2, CONTEXT - 2),), num_rows=1))
    heads = {op.weights[0] for op in program.ops if op.kind == "lm_head"}
    tables = {op.weights[0] for op in program.ops if op.kind == "embed"} - heads
    unread = sum(np.prod(program.weights[name]) for name in tables)
    rows = (CONTEXT - 2) * next(program.weights[op.weights[0]][1] for op in program.ops if op.kind == "embed")
    read = sum(cost.weight_bytes for cost in costs)
    assert read == pytest.approx(weight_bytes(program, 4) - 4 * unread + 4 * rows)
