"""How each kind of group becomes instructions of a tape. The kinds here are the ones that run natively.

Every emitter gives places to the values that leave its group. Called by the compiler, which frees them.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler, Emitter, Place
from ridgeline.backends.native.emit_experts import EXPERTS_EMITTERS
from ridgeline.backends.native.emit_latent import LATENT_EMITTERS
from ridgeline.backends.native.emit_recurrent import RECURRENT_EMITTERS
from ridgeline.core.dtypes import DTYPES
from ridgeline.program.op import LOGIT_ROWS, POSITIONS, TOKEN_IDS, Op
from ridgeline.program.ops.attention import AttentionAttrs, KvWriteAttrs, RopeAnglesAttrs, RopeAttrs
from ridgeline.program.ops.dense import (
    NORMS,
    ActivationAttrs,
    AddRowAttrs,
    EmbedAttrs,
    ScaleAttrs,
    SliceAttrs,
    SoftcapAttrs,
)
from ridgeline.program.passes.fuse import Group


def _ops(group: Group, *kinds: str) -> list[Op]:
    return [op for op in group.ops if op.kind in kinds]


def _leading_norm(group: Group, reader: Op) -> Op | None:
    """Return the norm of the group that `reader` reads."""
    return next((op for op in _ops(group, *NORMS) if op.outputs[0] == reader.inputs[0]), None)


def _embed(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, EmbedAttrs)
    out = compiler.new(op.outputs[0])
    ids = {TOKEN_IDS: "tokens", POSITIONS: "positions"}[op.inputs[0]]
    table = op.weights[0]
    heads = [other for other in compiler.program.ops if other.kind == "lm_head" and other.weights[0] == table]
    # The reference rounds the factor to the table's type.
    scale = float(np.array(op.attrs.scale, DTYPES[compiler.settings.dtype]))
    if heads:
        matrix, _ = compiler.matrix(heads[:1])
        compiler.tape.embed_packed(matrix, ids, scale, out.buffer)
    elif ids == "tokens" and (form := compiler.settings.table(table)) is not None:
        shape = compiler.program.weights[table]
        compiler.tape.embed_packed(
            compiler.weights.matrix(table, [table], (shape[0], shape[1]), form), ids, scale, out.buffer
        )
    else:
        address, kind = compiler.weights.table(table)
        compiler.tape.embed_rows(address, kind, ids, scale, out.buffer)


def _rope_angles(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, RopeAnglesAttrs)
    cos, sin = (compiler.new(name) for name in op.outputs)
    compiler.tape.rope_angles(list(op.attrs.frequencies), op.attrs.scale, cos.buffer, sin.buffer)


def _norm(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    x, out = compiler.place(op.inputs[0]), compiler.new(op.outputs[0])
    compiler.tape.normalize(compiler.norm(op), x.buffer, out.buffer, _head_dim(compiler, op.inputs[0]))


def _linear(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    x = compiler.place(op.inputs[0])
    matrix, bias = compiler.matrix([op])
    compiler.tape.linear(matrix, _native.Norm(), x.buffer, compiler.new(op.outputs[0]).buffer, bias=bias)


def _linear_add(compiler: Compiler, group: Group) -> None:
    linear, add = group.ops[0], group.ops[-1]
    (other,) = (name for name in add.inputs if name != linear.outputs[0])
    x, residual = compiler.place(linear.inputs[0]), compiler.place(other)
    matrix, bias = compiler.matrix([linear])
    if compiler.can_reuse_buffer(other) and x.buffer != residual.buffer:
        compiler.tape.linear(matrix, _native.Norm(), x.buffer, residual.buffer, epilogue="add", bias=bias)
        compiler.places[add.outputs[0]] = residual
        return
    out = compiler.new(add.outputs[0])
    compiler.tape.linear(matrix, _native.Norm(), x.buffer, out.buffer, bias=bias)
    compiler.tape.add(out.buffer, residual.buffer, out.buffer)


def _norm_gated(compiler: Compiler, group: Group) -> None:
    act = group.ops[-1]
    assert isinstance(act.attrs, ActivationAttrs)
    linears = {op.outputs[0]: op for op in _ops(group, "linear")}
    gate, up = linears[act.inputs[0]], linears[act.inputs[1]]
    norm = _leading_norm(group, gate)
    x = compiler.place((norm or gate).inputs[0])
    matrix, bias = compiler.matrix([gate, up], interleave=True)
    out = compiler.new(act.outputs[0])
    function = act.attrs.function
    compiler.tape.linear(
        matrix, compiler.norm(norm), x.buffer, out.buffer, epilogue="gate", activation=function, bias=bias
    )


def _norm_activated(compiler: Compiler, group: Group) -> None:
    linear, act = group.ops[-2:]
    assert isinstance(act.attrs, ActivationAttrs)
    norm = _leading_norm(group, linear)
    x = compiler.place((norm or linear).inputs[0])
    matrix, bias = compiler.matrix([linear])
    out = compiler.new(act.outputs[0])
    function = act.attrs.function
    compiler.tape.linear(
        matrix, compiler.norm(norm), x.buffer, out.buffer, epilogue="activate", activation=function, bias=bias
    )


def _norm_linears(compiler: Compiler, group: Group) -> None:
    linears = _ops(group, "linear")
    norm = _leading_norm(group, linears[0])
    x = compiler.place((norm or linears[0]).inputs[0])
    matrix, bias = compiler.matrix(linears)
    sizes = [compiler.program.weights[op.weights[0]][0] for op in linears]
    out = compiler.new(linears[0].outputs[0], sum(sizes))
    compiler.tape.linear(matrix, compiler.norm(norm), x.buffer, out.buffer, bias=bias)
    for part, (op, size) in enumerate(zip(linears, sizes)):
        compiler.places[op.outputs[0]] = compiler.slice(out, sum(sizes[:part]), size)


def _norm_head(compiler: Compiler, group: Group) -> None:
    (head,) = _ops(group, "lm_head")
    norm = _leading_norm(group, head)
    select = _ops(group, "select_rows")
    x = compiler.place((select[0] if select else norm or head).inputs[0])
    softcap = _ops(group, "softcap")
    cap = softcap[0].attrs.cap if softcap and isinstance(softcap[0].attrs, SoftcapAttrs) else 0.0
    matrix, bias = compiler.matrix([head])
    compiler.tape.linear(matrix, compiler.norm(norm), x.buffer, None, select=bool(select), bias=bias, softcap=cap)


def _norm_qkv(compiler: Compiler, group: Group) -> None:
    write = group.ops[-1] if group.ops[-1].kind == "kv_write" else _ops(group, "kv_write")[0]
    assert isinstance(write.attrs, KvWriteAttrs)
    chains = {chain[-1].outputs[0]: chain for chain in (_chain(group, op) for op in _ops(group, "linear"))}
    keys, values = (chains.pop(name) for name in write.inputs)
    ((q_name, queries),) = chains.items()
    linears = [chain[0] for chain in (queries, keys, values)]
    norm = _leading_norm(group, linears[0])
    x = compiler.place((norm or linears[0]).inputs[0])
    matrix, bias = compiler.matrix(linears)
    sizes = [compiler.program.weights[op.weights[0]][0] for op in linears]
    qkv = compiler.new(q_name, sum(sizes))
    compiler.tape.linear(matrix, compiler.norm(norm), x.buffer, qkv.buffer, bias=bias)
    q, k, v = (compiler.slice(qkv, sum(sizes[:part]), size) for part, size in enumerate(sizes))
    compiler.places[q_name] = q
    memory, cache_group = compiler.memories[write.attrs.state]
    at_once = [_emit_but_last_steps(compiler, chain[1:], place) for chain, place in ((queries, q), (keys, k))]
    q_norm, k_norm = (compiler.norm(next((op for op in steps if op.kind in NORMS), None)) for steps in at_once)
    ropes = [op for op in at_once[0] if op.kind == "rope"]
    rotation = _rotation(compiler, ropes[0]) if ropes else (None, None, False, 0)
    compiler.tape.heads(q.buffer, k.buffer, v.buffer, memory, cache_group, q_norm, k_norm, *rotation)


def _norm_q(compiler: Compiler, group: Group) -> None:
    linear, *steps = _chain(group, _ops(group, "linear")[0])
    norm = _leading_norm(group, linear)
    x = compiler.place((norm or linear).inputs[0])
    matrix, bias = compiler.matrix([linear])
    q = compiler.new(steps[-1].outputs[0])
    compiler.tape.linear(matrix, compiler.norm(norm), x.buffer, q.buffer, bias=bias)
    _emit_steps(compiler, steps, q)


def _emit_but_last_steps(compiler: Compiler, steps: Sequence[Op], place: Place) -> Sequence[Op]:
    """Emit steps of queries or keys in place, and return those left to `heads`: a norm of heads, then a rope."""
    first = next(index for index, op in enumerate(steps) if op.kind == "split_heads") + 1
    if [op.kind for op in steps[first : first + 1]] == ["rope"]:
        first = len(steps) - 1
    _emit_steps(compiler, steps[:first], place)
    return steps[first:]


def _emit_steps(compiler: Compiler, steps: Sequence[Op], place: Place) -> None:
    """Emit norms and ropes of queries or keys, in place."""
    for op in steps:
        head_dim = _head_dim(compiler, op.inputs[0])
        if op.kind in NORMS:
            compiler.tape.normalize(compiler.norm(op), place.buffer, place.buffer, head_dim)
        elif op.kind == "rope":
            compiler.tape.rotate(place.buffer, place.buffer, head_dim, *_rotation(compiler, op))


def _rotation(compiler: Compiler, rope: Op) -> tuple[int, int, bool, int]:
    """Return cos, sin, whether neighbours turn against each other, and the first entry that turns."""
    assert isinstance(rope.attrs, RopeAttrs)
    cos, sin = (compiler.place(name).buffer for name in rope.inputs[1:])
    return cos, sin, rope.attrs.interleaved, rope.attrs.offset


def _rope(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    x = compiler.place(op.inputs[0])
    out = x if compiler.can_reuse_buffer(op.inputs[0]) else compiler.new(op.outputs[0])
    compiler.places[op.outputs[0]] = out
    compiler.tape.rotate(x.buffer, out.buffer, _head_dim(compiler, op.inputs[0]), *_rotation(compiler, op))


def _kv_write(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, KvWriteAttrs)
    k, v = (compiler.place(name).buffer for name in op.inputs)
    memory, cache_group = compiler.memories[op.attrs.state]
    compiler.tape.heads(None, k, v, memory, cache_group, _native.Norm(), _native.Norm())


def _head_dim(compiler: Compiler, name: str) -> int:
    """Return the entries of each head of value `name`, 0 where it has no heads."""
    shape = compiler.program.shapes[name]
    head_dim = shape[-1] if len(shape) == 3 else 0
    assert isinstance(head_dim, int)
    return head_dim


def _chain(group: Group, linear: Op) -> list[Op]:
    """Return `linear` and the ops of the group that follow from it alone, in order."""
    chain = [linear]
    for op in group.ops:
        if op.inputs[:1] == chain[-1].outputs and op.outputs:
            chain.append(op)
    return chain


def _attention(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    attrs = op.attrs
    assert isinstance(attrs, AttentionAttrs)
    q, out = compiler.place(op.inputs[0]), compiler.new(op.outputs[0])
    memory, cache_group = compiler.memories[attrs.state]
    num_heads = q.width // compiler.kv_state(attrs.state).head_dim
    spec = _native.AttentionSpec(
        num_heads,
        attrs.scale,
        attrs.window or 0,
        attrs.softcap or 0.0,
        sinks=_sinks(compiler, op),
        slopes=_slopes(compiler, op.label, attrs),
        float32=compiler.settings.multiplies_bf16_in_float32,
    )
    compiler.tape.attention(spec, memory, cache_group, q.buffer, out.buffer)


def _sinks(compiler: Compiler, op: Op) -> int:
    """Return the address of the sinks, or 0."""
    return compiler.weights.vector(op.weights[0], lambda: compiler.weights.tensor(op.weights[0])) if op.weights else 0


def _slopes(compiler: Compiler, label: str, attrs: AttentionAttrs) -> int:
    """Return the address of the slopes, or 0."""
    slopes = attrs.alibi_slopes
    return compiler.weights.vector(f"{label}.slopes", lambda: np.array(slopes, np.float32)) if slopes else 0


def _split_heads(compiler: Compiler, group: Group) -> None:
    """Name the same memory differently; emit nothing."""
    (op,) = group.ops
    compiler.places[op.outputs[0]] = compiler.place(op.inputs[0])


def _slice(compiler: Compiler, group: Group) -> None:
    """Name columns of the same memory; emit nothing."""
    (op,) = group.ops
    assert isinstance(op.attrs, SliceAttrs)
    compiler.places[op.outputs[0]] = compiler.slice(compiler.place(op.inputs[0]), op.attrs.offset, op.attrs.size)


def _scale(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, ScaleAttrs)
    compiler.tape.scale(op.attrs.factor, compiler.place(op.inputs[0]).buffer, compiler.new(op.outputs[0]).buffer)


def _add(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    x, y = (compiler.place(name) for name in op.inputs)
    compiler.tape.add(x.buffer, y.buffer, compiler.new(op.outputs[0]).buffer)


def _add_row(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, AddRowAttrs)
    (table,), row = op.weights, op.attrs.row
    address = compiler.weights.vector(f"{table}.{row}", lambda: compiler.weights.tensor(table)[row])
    compiler.tape.add_row(compiler.place(op.inputs[0]).buffer, address, compiler.new(op.outputs[0]).buffer)


def _activation(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, ActivationAttrs)
    x = compiler.place(op.inputs[0])
    compiler.tape.activate(op.attrs.function, x.buffer, compiler.new(op.outputs[0]).buffer)


def _gated_activation(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, ActivationAttrs)
    gate, up = (compiler.place(name) for name in op.inputs)
    compiler.tape.gate(op.attrs.function, gate.buffer, up.buffer, compiler.new(op.outputs[0]).buffer)


def _select_rows(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert op.inputs[1] == LOGIT_ROWS
    x = compiler.place(op.inputs[0])
    compiler.tape.select(x.buffer, compiler.new(op.outputs[0]).buffer)


def _lora(compiler: Compiler, group: Group) -> None:
    (op,) = group.ops
    x, y = compiler.place(op.inputs[0]), compiler.place(op.inputs[1])
    a, b = op.weights
    count, rank, _ = compiler.program.weights[a]
    factors = (
        compiler.weights.vector(a, lambda: compiler.weights.tensor(a)),
        compiler.weights.vector(b, lambda: compiler.weights.tensor(b).swapaxes(1, 2)),
    )
    compiler.tape.lora(x.buffer, y.buffer, compiler.new(op.outputs[0]).buffer, *factors, count, rank)


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
