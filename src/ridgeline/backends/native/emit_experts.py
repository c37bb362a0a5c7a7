"""Mixtures of experts as instructions of a tape. `emit.py` has the table of all emitters."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler, Emitter
from ridgeline.backends.native.settings import format_of
from ridgeline.backends.native.weights import PANEL, interleaved
from ridgeline.program.ops.experts import ExpertsAttrs, RouteAttrs, expert_matrices
from ridgeline.program.passes.fuse import Group


def _route(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, RouteAttrs)
    logits = at.place(op.inputs[0])
    ids, weights = (at.new(name) for name in op.outputs)
    at.tape.route(
        logits.buffer,
        ids.buffer,
        weights.buffer,
        attrs.scoring,
        attrs.normalize,
        attrs.scale,
        attrs.num_groups,
        attrs.top_groups,
        attrs.group_score,
        at.weights.vector(op.weights[0], lambda: at.weights.tensor(op.weights[0])) if op.weights else 0,
    )


def _experts(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, ExpertsAttrs)
    x, ids, weights = (at.place(name) for name in op.inputs)
    gate_up, (down,) = expert_matrices(op)
    biases = list(op.weights[3:])
    gate_up_bias = down_bias = 0
    if biases:
        gate_up_bias = at.weights.vector(f"{'+'.join(gate_up)}.bias", lambda: _interleaved_bias(at, biases[:2]))
        down_bias = at.weights.vector(biases[2], lambda: _padded_bias(at, biases[2]))
    at.tape.experts(
        at.program.weights[down][0],
        _matrix(at, gate_up),
        _matrix(at, [down]),
        x.buffer,
        ids.buffer,
        weights.buffer,
        at.new(op.outputs[0]).buffer,
        attrs.activation,
        attrs.limit or 0.0,
        attrs.alpha,
        gate_up_bias,
        down_bias,
    )


def _matrix(at: Compiler, names: Sequence[str]) -> _native.Matrix:
    """The first expert's rows of the weights `names`, two of which are interleaved."""
    num_experts, rows, inputs = at.program.weights[names[0]]
    form = format_of(at.settings, at.program, *names)
    shape = (len(names) * rows, inputs)
    interleave = len(names) == 2
    return at.weights.matrix("+".join(names), names, shape, form, interleave=interleave, num_experts=num_experts)


def _interleaved_bias(at: Compiler, names: list[str]) -> torch.Tensor:
    joined_EN = torch.cat([at.weights.tensor(name).float() for name in names], dim=1)
    order = torch.from_numpy(interleaved(joined_EN.shape[1] // 2))
    return torch.where(order >= 0, joined_EN[:, order.clamp(min=0)], 0.0)


def _padded_bias(at: Compiler, name: str) -> torch.Tensor:
    """Every expert's, in whole panels."""
    bias_EN = at.weights.tensor(name)
    return F.pad(bias_EN, (0, -bias_EN.shape[1] % PANEL))


def _gate_rows(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    x, gate = (at.place(name) for name in op.inputs)
    at.tape.gate_rows(x.buffer, gate.buffer, at.new(op.outputs[0]).buffer)


EXPERTS_EMITTERS: Mapping[str, Emitter] = {"route": _route, "experts": _experts, "gate_rows": _gate_rows}
