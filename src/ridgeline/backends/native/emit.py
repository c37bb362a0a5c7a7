"""How each kind of group becomes instructions of a tape. The kinds here are the ones that run natively.

Every emitter gives places to the values that leave its group. Called by the compiler, which frees them.
"""

from collections.abc import Mapping, Sequence

import torch

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler, Emitter, Place
from ridgeline.backends.native.emit_experts import EXPERTS_EMITTERS
from ridgeline.backends.native.emit_latent import LATENT_EMITTERS
from ridgeline.backends.native.emit_recurrent import RECURRENT_EMITTERS
from ridgeline.program.op import LOGIT_ROWS, POSITIONS, TOKEN_IDS, Op
from ridgeline.program.ops.attention import AttentionAttrs, KvWriteAttrs, RopeAnglesAttrs, RopeAttrs
from ridgeline.program.ops.dense import ActivationAttrs, AddRowAttrs, EmbedAttrs, ScaleAttrs, SliceAttrs, SoftcapAttrs
from ridgeline.program.passes.fuse import NORMS, Group

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _ops(group: Group, *kinds: str) -> list[Op]:
    return [op for op in group.ops if op.kind in kinds]


def _leading_norm(group: Group, reader: Op) -> Op | None:
    """The norm of the group that `reader` reads."""
    return next((op for op in _ops(group, *NORMS) if op.outputs[0] == reader.inputs[0]), None)


def _embed(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, EmbedAttrs)
    out = at.new(op.outputs[0])
    ids = {TOKEN_IDS: "tokens", POSITIONS: "positions"}[op.inputs[0]]
    table = op.weights[0]
    heads = [other for other in at.program.ops if other.kind == "lm_head" and other.weights[0] == table]
    # The reference rounds the factor to the table's type.
    scale = float(torch.tensor(op.attrs.scale, dtype=DTYPES[at.settings.dtype]))
    if heads:
        matrix, _ = at.matrix(heads[:1])
        at.tape.embed_packed(matrix, ids, scale, out.buffer)
    elif ids == "tokens" and (form := at.settings.table(table)) is not None:
        shape = at.program.weights[table]
        at.tape.embed_packed(at.weights.matrix(table, [table], (shape[0], shape[1]), form), ids, scale, out.buffer)
    else:
        address, kind = at.weights.table(table)
        at.tape.embed_rows(address, kind, ids, scale, out.buffer)


def _rope_angles(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, RopeAnglesAttrs)
    cos, sin = (at.new(name) for name in op.outputs)
    at.tape.rope_angles(list(op.attrs.frequencies), op.attrs.scale, cos.buffer, sin.buffer)


def _norm(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    x, out = at.place(op.inputs[0]), at.new(op.outputs[0])
    at.tape.normalize(at.norm(op), x.buffer, out.buffer, _head_dim(at, op.inputs[0]))


def _linear(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    x = at.place(op.inputs[0])
    matrix, bias = at.matrix([op])
    at.tape.linear(matrix, _native.Norm(), x.buffer, at.new(op.outputs[0]).buffer, bias=bias)


def _linear_add(at: Compiler, group: Group) -> None:
    linear, add = group.ops[0], group.ops[-1]
    (other,) = (name for name in add.inputs if name != linear.outputs[0])
    x, residual = at.place(linear.inputs[0]), at.place(other)
    matrix, bias = at.matrix([linear])
    if at.takes_over(other) and x.buffer != residual.buffer:
        at.tape.linear(matrix, _native.Norm(), x.buffer, residual.buffer, epilogue="add", bias=bias)
        at.places[add.outputs[0]] = residual
        return
    out = at.new(add.outputs[0])
    at.tape.linear(matrix, _native.Norm(), x.buffer, out.buffer, bias=bias)
    at.tape.add(out.buffer, residual.buffer, out.buffer)


def _norm_gated(at: Compiler, group: Group) -> None:
    act = group.ops[-1]
    assert isinstance(act.attrs, ActivationAttrs)
    linears = {op.outputs[0]: op for op in _ops(group, "linear")}
    gate, up = linears[act.inputs[0]], linears[act.inputs[1]]
    norm = _leading_norm(group, gate)
    x = at.place((norm or gate).inputs[0])
    matrix, bias = at.matrix([gate, up], interleave=True)
    out = at.new(act.outputs[0])
    function = act.attrs.function
    at.tape.linear(matrix, at.norm(norm), x.buffer, out.buffer, epilogue="gate", activation=function, bias=bias)


def _norm_activated(at: Compiler, group: Group) -> None:
    linear, act = group.ops[-2:]
    assert isinstance(act.attrs, ActivationAttrs)
    norm = _leading_norm(group, linear)
    x = at.place((norm or linear).inputs[0])
    matrix, bias = at.matrix([linear])
    out = at.new(act.outputs[0])
    function = act.attrs.function
    at.tape.linear(matrix, at.norm(norm), x.buffer, out.buffer, epilogue="activate", activation=function, bias=bias)


def _norm_linears(at: Compiler, group: Group) -> None:
    linears = _ops(group, "linear")
    norm = _leading_norm(group, linears[0])
    x = at.place((norm or linears[0]).inputs[0])
    matrix, bias = at.matrix(linears)
    sizes = [at.program.weights[op.weights[0]][0] for op in linears]
    out = at.new(linears[0].outputs[0], sum(sizes))
    at.tape.linear(matrix, at.norm(norm), x.buffer, out.buffer, bias=bias)
    for part, (op, size) in enumerate(zip(linears, sizes)):
        at.places[op.outputs[0]] = at.slice(out, sum(sizes[:part]), size)


def _norm_head(at: Compiler, group: Group) -> None:
    (head,) = _ops(group, "lm_head")
    norm = _leading_norm(group, head)
    select = _ops(group, "select_rows")
    x = at.place((select[0] if select else norm or head).inputs[0])
    softcap = _ops(group, "softcap")
    cap = softcap[0].attrs.cap if softcap and isinstance(softcap[0].attrs, SoftcapAttrs) else 0.0
    matrix, bias = at.matrix([head])
    at.tape.linear(matrix, at.norm(norm), x.buffer, None, select=bool(select), bias=bias, softcap=cap)


def _norm_qkv(at: Compiler, group: Group) -> None:
    write = group.ops[-1] if group.ops[-1].kind == "kv_write" else _ops(group, "kv_write")[0]
    assert isinstance(write.attrs, KvWriteAttrs)
    chains = {chain[-1].outputs[0]: chain for chain in (_chain(group, op) for op in _ops(group, "linear"))}
    keys, values = (chains.pop(name) for name in write.inputs)
    ((q_name, queries),) = chains.items()
    linears = [chain[0] for chain in (queries, keys, values)]
    norm = _leading_norm(group, linears[0])
    x = at.place((norm or linears[0]).inputs[0])
    matrix, bias = at.matrix(linears)
    sizes = [at.program.weights[op.weights[0]][0] for op in linears]
    qkv = at.new(q_name, sum(sizes))
    at.tape.linear(matrix, at.norm(norm), x.buffer, qkv.buffer, bias=bias)
    q, k, v = (at.slice(qkv, sum(sizes[:part]), size) for part, size in enumerate(sizes))
    at.places[q_name] = q
    memory, cache_group = at.memories[write.attrs.state]
    at_once = [_emit_but_last_steps(at, chain[1:], place) for chain, place in ((queries, q), (keys, k))]
    q_norm, k_norm = (at.norm(next((op for op in steps if op.kind in NORMS), None)) for steps in at_once)
    ropes = [op for op in at_once[0] if op.kind == "rope"]
    rotation = _rotation(at, ropes[0]) if ropes else (None, None, False, 0)
    at.tape.heads(q.buffer, k.buffer, v.buffer, memory, cache_group, q_norm, k_norm, *rotation)


def _norm_q(at: Compiler, group: Group) -> None:
    linear, *steps = _chain(group, _ops(group, "linear")[0])
    norm = _leading_norm(group, linear)
    x = at.place((norm or linear).inputs[0])
    matrix, bias = at.matrix([linear])
    q = at.new(steps[-1].outputs[0])
    at.tape.linear(matrix, at.norm(norm), x.buffer, q.buffer, bias=bias)
    _emit_steps(at, steps, q)


def _emit_but_last_steps(at: Compiler, steps: Sequence[Op], place: Place) -> Sequence[Op]:
    """The steps of queries or keys, in place, up to those that `heads` does at once: a norm of heads, then a rope."""
    first = next(index for index, op in enumerate(steps) if op.kind == "split_heads") + 1
    if [op.kind for op in steps[first : first + 1]] == ["rope"]:
        first = len(steps) - 1
    _emit_steps(at, steps[:first], place)
    return steps[first:]


def _emit_steps(at: Compiler, steps: Sequence[Op], place: Place) -> None:
    """Norms and ropes of queries or keys, in place."""
    for op in steps:
        head_dim = _head_dim(at, op.inputs[0])
        if op.kind in NORMS:
            at.tape.normalize(at.norm(op), place.buffer, place.buffer, head_dim)
        elif op.kind == "rope":
            at.tape.rotate(place.buffer, place.buffer, head_dim, *_rotation(at, op))


def _rotation(at: Compiler, rope: Op) -> tuple[int, int, bool, int]:
    """cos, sin, whether neighbours turn against each other, and the first entry that turns."""
    assert isinstance(rope.attrs, RopeAttrs)
    cos, sin = (at.place(name).buffer for name in rope.inputs[1:])
    return cos, sin, rope.attrs.interleaved, rope.attrs.offset


def _rope(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    x = at.place(op.inputs[0])
    out = x if at.takes_over(op.inputs[0]) else at.new(op.outputs[0])
    at.places[op.outputs[0]] = out
    at.tape.rotate(x.buffer, out.buffer, _head_dim(at, op.inputs[0]), *_rotation(at, op))


def _kv_write(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, KvWriteAttrs)
    k, v = (at.place(name).buffer for name in op.inputs)
    memory, cache_group = at.memories[op.attrs.state]
    at.tape.heads(None, k, v, memory, cache_group, _native.Norm(), _native.Norm())


def _head_dim(at: Compiler, name: str) -> int:
    """Entries of each head of value `name`, 0 where it has no heads."""
    shape = at.program.shapes[name]
    head_dim = shape[-1] if len(shape) == 3 else 0
    assert isinstance(head_dim, int)
    return head_dim


def _chain(group: Group, linear: Op) -> list[Op]:
    """`linear` and the ops of the group that follow from it alone, in order."""
    chain = [linear]
    for op in group.ops:
        if op.inputs[:1] == chain[-1].outputs and op.outputs:
            chain.append(op)
    return chain


def _attention(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, AttentionAttrs)
    q, out = at.place(op.inputs[0]), at.new(op.outputs[0])
    memory, cache_group = at.memories[attrs.state]
    num_heads = q.width // at.kv_state(attrs.state).head_dim
    spec = _native.AttentionSpec(
        num_heads,
        attrs.scale,
        attrs.window or 0,
        attrs.softcap or 0.0,
        sinks=_sinks(at, op),
        slopes=_slopes(at, op.label, attrs),
    )
    at.tape.attention(spec, memory, cache_group, q.buffer, out.buffer)


def _sinks(at: Compiler, op: Op) -> int:
    """The address of the sinks, or 0."""
    return at.weights.vector(op.weights[0], lambda: at.weights.tensor(op.weights[0])) if op.weights else 0


def _slopes(at: Compiler, label: str, attrs: AttentionAttrs) -> int:
    """The address of the slopes, or 0."""
    slopes = attrs.alibi_slopes
    return at.weights.vector(f"{label}.slopes", lambda: torch.tensor(slopes)) if slopes else 0


def _split_heads(at: Compiler, group: Group) -> None:
    """The same memory under another name."""
    (op,) = group.ops
    at.places[op.outputs[0]] = at.place(op.inputs[0])


def _slice(at: Compiler, group: Group) -> None:
    """Columns of the same memory."""
    (op,) = group.ops
    assert isinstance(op.attrs, SliceAttrs)
    at.places[op.outputs[0]] = at.slice(at.place(op.inputs[0]), op.attrs.offset, op.attrs.size)


def _scale(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, ScaleAttrs)
    at.tape.scale(op.attrs.factor, at.place(op.inputs[0]).buffer, at.new(op.outputs[0]).buffer)


def _add(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    x, y = (at.place(name) for name in op.inputs)
    at.tape.add(x.buffer, y.buffer, at.new(op.outputs[0]).buffer)


def _add_row(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, AddRowAttrs)
    (table,), row = op.weights, op.attrs.row
    address = at.weights.vector(f"{table}.{row}", lambda: at.weights.tensor(table)[row])
    at.tape.add_row(at.place(op.inputs[0]).buffer, address, at.new(op.outputs[0]).buffer)


def _activation(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, ActivationAttrs)
    x = at.place(op.inputs[0])
    at.tape.activate(op.attrs.function, x.buffer, at.new(op.outputs[0]).buffer)


def _gated_activation(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, ActivationAttrs)
    gate, up = (at.place(name) for name in op.inputs)
    at.tape.gate(op.attrs.function, gate.buffer, up.buffer, at.new(op.outputs[0]).buffer)


def _select_rows(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert op.inputs[1] == LOGIT_ROWS
    x = at.place(op.inputs[0])
    at.tape.select(x.buffer, at.new(op.outputs[0]).buffer)


def _lora(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    x, y = at.place(op.inputs[0]), at.place(op.inputs[1])
    a, b = op.weights
    count, rank, _ = at.program.weights[a]
    factors = (
        at.weights.vector(a, lambda: at.weights.tensor(a)),
        at.weights.vector(b, lambda: at.weights.tensor(b).transpose(1, 2)),
    )
    at.tape.lora(x.buffer, y.buffer, at.new(op.outputs[0]).buffer, *factors, count, rank)


EMITTERS: Mapping[str, Emitter] = {
    "norm_qkv": _norm_qkv,
    "norm_q": _norm_q,
    "attention": _attention,
    "linear_add": _linear_add,
    "norm_gated": _norm_gated,
    "norm_activated": _norm_activated,
    "norm_head": _norm_head,
    "norm_linears": _norm_linears,
    "embed": _embed,
    "rope_angles": _rope_angles,
    "rmsnorm": _norm,
    "layernorm": _norm,
    "linear": _linear,
    "rope": _rope,
    "kv_write": _kv_write,
    "split_heads": _split_heads,
    "slice": _slice,
    "scale": _scale,
    "add": _add,
    "add_row": _add_row,
    "lora": _lora,
    "activation": _activation,
    "gated_activation": _gated_activation,
    "select_rows": _select_rows,
    **LATENT_EMITTERS,
    **RECURRENT_EMITTERS,
    **EXPERTS_EMITTERS,
}
NATIVE_KINDS = tuple(EMITTERS)
