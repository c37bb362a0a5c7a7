"""How the ops of recurrent layers become instructions of a tape. Called by the compiler through `emit.py`."""

from collections.abc import Mapping

import torch

from ridgeline.backends.native.compile import Compiler, Emitter
from ridgeline.program.op import Op
from ridgeline.program.ops.recurrent import CausalConvAttrs, GatedNormAttrs, RecurrentAttrs, RetentionAttrs, SsdAttrs
from ridgeline.program.passes.fuse import Group


def _rate(at: Compiler, name: str) -> int:
    """Address of -exp(A_log): the logarithm of the decay for each unit of step size."""
    return at.weights.vector(f"{name}.rate", lambda: -at.weights.tensor(name).float().exp())


def _vector(at: Compiler, name: str) -> int:
    return at.weights.vector(name, lambda: at.weights.tensor(name))


def _inputs(at: Compiler, op: Op) -> list[int]:
    return [at.place(name).buffer for name in op.inputs]


def _heads(at: Compiler, name: str) -> int:
    heads = at.program.shapes[name][1]
    assert isinstance(heads, int)
    return heads


def _causal_conv(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, CausalConvAttrs)
    weight, *bias = op.weights
    taps = at.program.weights[weight][1]
    taps_WC = at.weights.vector(f"{weight}.taps", lambda: at.weights.tensor(weight).T)
    (x,), out = _inputs(at, op), at.new(op.outputs[0]).buffer
    bias_C = _vector(at, bias[0]) if bias else 0
    at.tape.causal_conv(x, out, taps, taps_WC, at.state_part(op.attrs), bias_C, op.attrs.activation)


def _selective_scan(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, RecurrentAttrs)
    x, dt, b, c = _inputs(at, op)
    out = at.new(op.outputs[0]).buffer
    decay, skip = op.weights
    at.tape.selective_scan(x, dt, b, c, out, _rate(at, decay), _vector(at, skip), at.state_part(op.attrs))


def _ssd(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, SsdAttrs)
    x, dt, b, c = _inputs(at, op)
    out = at.new(op.outputs[0]).buffer
    decay, skip, dt_bias = op.weights
    at.tape.recur(
        "ssd",
        _heads(at, op.inputs[0]),
        _heads(at, op.inputs[2]),
        q=c,
        k=b,
        v=x,
        dt=dt,
        beta=None,
        out=out,
        rate=_rate(at, decay),
        state=at.state_part(attrs),
        dt_bias=_vector(at, dt_bias),
        skip=_vector(at, skip),
        dt_min=attrs.dt_min,
        dt_max=attrs.dt_max,
    )


def _delta_rule(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, RecurrentAttrs)
    q, k, v, a, b = _inputs(at, op)
    out = at.new(op.outputs[0]).buffer
    decay, dt_bias = op.weights
    at.tape.recur(
        "delta",
        _heads(at, op.inputs[2]),
        _heads(at, op.inputs[0]),
        q=q,
        k=k,
        v=v,
        dt=a,
        beta=b,
        out=out,
        rate=_rate(at, decay),
        state=at.state_part(op.attrs),
        dt_bias=_vector(at, dt_bias),
    )


def _retention(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, RetentionAttrs)
    q, k, v = _inputs(at, op)
    out = at.new(op.outputs[0]).buffer
    heads = _heads(at, op.inputs[0])
    rate = at.weights.vector(f"{op.label}.rate", lambda: -torch.tensor(attrs.rates))
    state = at.state_part(attrs)
    at.tape.recur("retention", heads, heads, q=q, k=k, v=v, dt=None, beta=None, out=out, rate=rate, state=state)


def _gated_norm(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, GatedNormAttrs)
    (x, z), out = _inputs(at, op), at.new(op.outputs[0]).buffer
    (weight,) = op.weights
    shared = at.program.weights[weight] == (attrs.group,)
    at.tape.gated_norm(x, z, out, attrs.group, attrs.eps, attrs.norm_before_gate, _vector(at, weight), shared)


RECURRENT_EMITTERS: Mapping[str, Emitter] = {
    "causal_conv": _causal_conv,
    "selective_scan": _selective_scan,
    "ssd": _ssd,
    "delta_rule": _delta_rule,
    "retention": _retention,
    "gated_norm": _gated_norm,
}
