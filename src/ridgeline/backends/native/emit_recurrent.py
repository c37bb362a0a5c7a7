"""Define how the ops of recurrent layers become instructions of a tape. Called by the compiler through `emit.py`."""

from collections.abc import Mapping

import numpy as np

from ridgeline.backends.native.compile import Compiler, Emitter
from ridgeline.program.op import Op
from ridgeline.program.ops.recurrent import CausalConvAttrs, GatedNormAttrs, RecurrentAttrs, RetentionAttrs, SsdAttrs
from ridgeline.program.passes.fuse import Group


def _rate(compiler: Compiler, name: str) -> int:
    """Return the address of -exp(A_log): the logarithm of the decay for each unit of step size."""
    return compiler.weights.vector(f"{name}.rate", lambda: -np.exp(compiler.weights.tensor(name).astype(np.float64)))


def _vector(compiler: Compiler, name: str) -> int:
    return compiler.weights.vector(name, lambda: compiler.weights.tensor(name))


def _inputs(compiler: Compiler, op: Op) -> list[int]:
    return [compiler.place(name).buffer for name in op.inputs]


def _heads(compiler: Compiler, name: str) -> int:
    heads = compiler.program.shapes[name][1]
    assert isinstance(heads, int)
    return heads


def _causal_conv(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, CausalConvAttrs)
    weight, *bias = op.weights
    taps = compiler.program.weights[weight][1]
    taps_WC = compiler.weights.vector(f"{weight}.taps", lambda: compiler.weights.tensor(weight).T)
    (x,), out = _inputs(compiler, op), compiler.new(op.outputs[0]).buffer
    bias_C = _vector(compiler, bias[0]) if bias else 0
    compiler.tape.causal_conv(x, out, taps, taps_WC, compiler.state_part(op.attrs), bias_C, op.attrs.activation)


def _selective_scan(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, RecurrentAttrs)
    x, dt, b, c = _inputs(compiler, op)
    out = compiler.new(op.outputs[0]).buffer
    decay, skip = op.weights
    compiler.tape.selective_scan(
        x, dt, b, c, out, _rate(compiler, decay), _vector(compiler, skip), compiler.state_part(op.attrs)
    )


def _ssd(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, SsdAttrs)
    x, dt, b, c = _inputs(compiler, op)
    out = compiler.new(op.outputs[0]).buffer
    decay, skip, dt_bias = op.weights
    compiler.tape.recur(
        "ssd",
        _heads(compiler, op.inputs[0]),
        _heads(compiler, op.inputs[2]),
        q=c,
        k=b,
        v=x,
        dt=dt,
        beta=None,
        out=out,
        rate=_rate(compiler, decay),
        state=compiler.state_part(attrs),
        dt_bias=_vector(compiler, dt_bias),
        skip=_vector(compiler, skip),
        dt_min=attrs.dt_min,
        dt_max=attrs.dt_max,
    )


def _delta_rule(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, RecurrentAttrs)
    q, k, v, a, b = _inputs(compiler, op)
    out = compiler.new(op.outputs[0]).buffer
    decay, dt_bias = op.weights
    compiler.tape.recur(
        "delta",
        _heads(compiler, op.inputs[2]),
        _heads(compiler, op.inputs[0]),
        q=q,
        k=k,
        v=v,
        dt=a,
        beta=b,
        out=out,
        rate=_rate(compiler, decay),
        state=compiler.state_part(op.attrs),
        dt_bias=_vector(compiler, dt_bias),
    )


def _retention(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, RetentionAttrs)
    q, k, v = _inputs(compiler, op)
    out = compiler.new(op.outputs[0]).buffer
    heads = _heads(compiler, op.inputs[0])
    rate = compiler.weights.vector(f"{op.label}.rate", lambda: -np.array(attrs.rates, np.float32))
    state = compiler.state_part(attrs)
    compiler.tape.recur("retention", heads, heads, q=q, k=k, v=v, dt=None, beta=None, out=out, rate=rate, state=state)


def _gated_norm(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, GatedNormAttrs)
    (x, z), out = _inputs(compiler, op), compiler.new(op.outputs[0]).buffer
    (weight,) = op.weights
    shared = compiler.program.weights[weight] == (attrs.group,)
    compiler.tape.gated_norm(
        x, z, out, attrs.group, attrs.eps, attrs.norm_before_gate, _vector(compiler, weight), shared
    )


RECURRENT_EMITTERS: Mapping[str, Emitter] = {
    "causal_conv": _causal_conv,
    "selective_scan": _selective_scan,
    "ssd": _ssd,
    "delta_rule": _delta_rule,
    "retention": _retention,
    "gated_norm": _gated_norm,
}
