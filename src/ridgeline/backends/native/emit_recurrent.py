"""Define how the ops of recurrent layers become instructions of a tape. Called by the compiler through `emit.py`."""

import numpy as np

from ridgeline.backends.native.compile import Compiler
from ridgeline.program.op import Op, dims_of
from ridgeline.program.ops.recurrent import CausalConvAttrs, GatedNormAttrs, RecurrentAttrs, RetentionAttrs, SsdAttrs


def _rate(compiler: Compiler, name: str) -> int:
    """Return the address of -exp(A_log): the logarithm of the decay for each unit of step size."""
    return compiler.weights.vector(f"{name}.rate", lambda: -np.exp(compiler.weights.tensor(name).astype(np.float64)))


def _heads(compiler: Compiler, name: str) -> int:
    return dims_of(compiler.program.shapes[name])[0]


def causal_conv(compiler: Compiler, op: Op, attrs: CausalConvAttrs) -> None:
    weight, *bias = op.weights
    taps = compiler.program.weights[weight][1]
    taps_WC = compiler.weights.vector(f"{weight}.taps", lambda: compiler.weights.tensor(weight).T)
    (x,), out = compiler.inputs(op), compiler.output(op)
    bias_C = compiler.vector(bias[0]) if bias else 0
    compiler.tape.causal_conv(x, out, taps, taps_WC, compiler.state_part(attrs), bias_C, attrs.activation)


def selective_scan(compiler: Compiler, op: Op, attrs: RecurrentAttrs) -> None:
    x, dt, b, c = compiler.inputs(op)
    rate, skip = _rate(compiler, op.weights[0]), compiler.vector(op.weights[1])
    compiler.tape.selective_scan(x, dt, b, c, compiler.output(op), rate, skip, compiler.state_part(attrs))


def ssd(compiler: Compiler, op: Op, attrs: SsdAttrs) -> None:
    v, dt, k, q = compiler.inputs(op)  # x, dt, B and C
    heads, groups = _heads(compiler, op.inputs[0]), _heads(compiler, op.inputs[2])
    out, state = compiler.output(op), compiler.state_part(attrs)
    rate, skip, dt_bias = _rate(compiler, op.weights[0]), *map(compiler.vector, op.weights[1:])
    limits = (attrs.dt_min, attrs.dt_max)
    compiler.tape.recur("ssd", heads, groups, q, k, v, dt, None, out, rate, state, dt_bias, skip, *limits)


def delta_rule(compiler: Compiler, op: Op, attrs: RecurrentAttrs) -> None:
    q, k, v, dt, beta = compiler.inputs(op)
    heads, key_heads = _heads(compiler, op.inputs[2]), _heads(compiler, op.inputs[0])
    out, state = compiler.output(op), compiler.state_part(attrs)
    rate, dt_bias = _rate(compiler, op.weights[0]), compiler.vector(op.weights[1])
    compiler.tape.recur("delta", heads, key_heads, q, k, v, dt, beta, out, rate, state, dt_bias)


def retention(compiler: Compiler, op: Op, attrs: RetentionAttrs) -> None:
    q, k, v = compiler.inputs(op)
    heads, out, state = _heads(compiler, op.inputs[0]), compiler.output(op), compiler.state_part(attrs)
    rate = compiler.weights.vector(f"{op.label}.rate", lambda: -np.array(attrs.rates, np.float32))
    compiler.tape.recur("retention", heads, heads, q, k, v, None, None, out, rate, state)


def gated_norm(compiler: Compiler, op: Op, attrs: GatedNormAttrs) -> None:
    (x, z), out = compiler.inputs(op), compiler.output(op)
    (weight,) = op.weights
    shared = compiler.program.weights[weight] == (attrs.group,)
    compiler.tape.gated_norm(x, z, out, attrs.group, attrs.eps, attrs.norm_before_gate, compiler.vector(weight), shared)
