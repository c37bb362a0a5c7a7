"""Implement mixtures of experts as instructions of a tape. `emit.py` has the table of all emitters."""

from collections.abc import Sequence

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler
from ridgeline.backends.native.weights import PANEL, in_order, interleaved
from ridgeline.core.dtypes import Array, float32
from ridgeline.program.op import Attrs, Op
from ridgeline.program.ops.experts import ExpertsAttrs, RouteAttrs, expert_matrices
from ridgeline.spec.spec import ClampedSwiGlu


def route(compiler: Compiler, op: Op, attrs: RouteAttrs) -> None:
    (logits,), (ids, weights) = compiler.inputs(op), (compiler.new(name).buffer for name in op.outputs)
    r = attrs.routing
    how = (r.scoring, r.normalize, r.scale, r.num_groups, r.top_groups, r.group_score)
    compiler.tape.route(logits, ids, weights, *how, compiler.vector(op.weights[0]) if op.weights else 0)


def experts(compiler: Compiler, op: Op, attrs: ExpertsAttrs) -> None:
    x, ids, weights = compiler.inputs(op)
    gate_up, (down,) = expert_matrices(op)
    gate_up_bias = down_bias = 0
    if biases := list(op.weights[3:]):
        name = f"{'+'.join(gate_up)}.bias"
        gate_up_bias = compiler.weights.vector(name, lambda: _interleaved_bias(compiler, biases[:2]))
        down_bias = compiler.weights.vector(biases[2], lambda: _padded_bias(compiler, biases[2]))
    matrices = (compiler.program.weights[down][0], _matrix(compiler, gate_up), _matrix(compiler, [down]))
    act, out = attrs.activation, compiler.output(op)
    function = ("silu", act.limit, act.alpha) if isinstance(act, ClampedSwiGlu) else (act, 0.0, 1.0)
    compiler.tape.experts(*matrices, x, ids, weights, out, *function, gate_up_bias, down_bias)


def _matrix(compiler: Compiler, names: Sequence[str]) -> _native.Matrix:
    """Return the first expert's rows of the weights `names`, two of which are interleaved."""
    num_experts, rows, inputs = compiler.program.weights[names[0]]
    form = compiler.formats.of(*names)
    shape = (len(names) * rows, inputs)
    interleave = len(names) == 2
    return compiler.weights.matrix("+".join(names), names, shape, form, interleave=interleave, num_experts=num_experts)


def _interleaved_bias(compiler: Compiler, names: list[str]) -> Array:
    joined_EN = np.concatenate([float32(compiler.weights.tensor(name)) for name in names], axis=1)
    return in_order(joined_EN, interleaved(joined_EN.shape[1] // 2))


def _padded_bias(compiler: Compiler, name: str) -> Array:
    """Return every expert's bias, padded to whole panels."""
    bias_EN = float32(compiler.weights.tensor(name))
    return np.pad(bias_EN, ((0, 0), (0, -bias_EN.shape[1] % PANEL)))


def gate_rows(compiler: Compiler, op: Op, attrs: Attrs) -> None:
    x, gate = compiler.inputs(op)
    compiler.tape.gate_rows(x, gate, compiler.output(op))
