"""How each kind of group becomes instructions of a tape: the functions here and in `emit_*.py`, named as the kinds.

One of a fused group takes the group; one of an op takes the op and its attributes. Every one gives places to the
values that leave its group. Called by the compiler, which frees them.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler, Emitter, Place
from ridgeline.backends.native.kinds import KINDS_BY_FILE
from ridgeline.core.dtypes import DTYPES
from ridgeline.program.op import LOGIT_ROWS, POSITIONS, TOKEN_IDS, Attrs, KvState, Op, dims_of
from ridgeline.program.ops import dense
from ridgeline.program.ops.attention import AttentionAttrs, CacheWriteAttrs, RopeAnglesAttrs, RopeAttrs
from ridgeline.program.opset import OPSET
from ridgeline.program.passes.fuse import Group


def _ops(group: Group, *kinds: str) -> list[Op]:
    return [op for op in group.ops if op.kind in kinds]


def _product(
    compiler: Compiler,
    group: Group,
    linears: Sequence[Op],
    out: Place,
    *,
    epilogue: str = "store",
    activation: str = "relu",
    interleave: bool = False,
) -> None:
    """Multiply what `linears` read, normalised where the group has the norm, by all their weights as one matrix.

    Inputs that keep more bits than others are a matrix of their own, of which the product is added.
    """
    norm = _leading_norm(group, linears[0])
    x = compiler.place((norm or linears[0]).inputs[0])
    matrix, bias = compiler.matrix(linears, interleave=interleave)
    outliers = compiler.outliers(linears)
    if outliers is not None and norm is not None:
        row = compiler.new(norm.outputs[0])
        compiler.tape.normalize(compiler.norm(norm), x.buffer, row.buffer, _head_dim(compiler, norm.inputs[0]))
        x, norm = row, None
    compiler.tape.linear(
        matrix, compiler.norm(norm), x.buffer, out.buffer, epilogue=epilogue, activation=activation, bias=bias
    )
    if outliers is not None:
        compiler.tape.linear(outliers, _native.Norm(), x.buffer, out.buffer, epilogue="add")


def _leading_norm(group: Group, reader: Op) -> Op | None:
    """Return the norm of the group that `reader` reads."""
    return next((op for op in _ops(group, *dense.NORMS) if op.outputs[0] == reader.inputs[0]), None)


def embed(compiler: Compiler, op: Op, attrs: dense.EmbedAttrs) -> None:
    out = compiler.output(op)
    ids = {TOKEN_IDS: "types" if attrs.of_types else "tokens", POSITIONS: "positions"}[op.inputs[0]]
    table = op.weights[0]
    heads = [other for other in compiler.program.ops if other.kind == "lm_head" and other.weights[0] == table]
    # The reference rounds the factor to the table's type.
    scale = float(np.array(attrs.scale, DTYPES[compiler.settings.dtype]))
    if heads:
        matrix, _ = compiler.matrix(heads[:1])
        compiler.tape.embed_packed(matrix, ids, scale, out, attrs.vocab_size)
    elif ids == "tokens" and (form := compiler.settings.table(table)) is not None:
        num_rows, width = compiler.program.weights[table]
        matrix = compiler.weights.matrix(table, [table], (num_rows, width), form)
        compiler.tape.embed_packed(matrix, ids, scale, out, attrs.vocab_size)
    else:
        address, kind = compiler.weights.table(table)
        compiler.tape.embed_rows(address, kind, ids, scale, out, attrs.vocab_size)


def rope_angles(compiler: Compiler, op: Op, attrs: RopeAnglesAttrs) -> None:
    cos, sin = (compiler.new(name) for name in op.outputs)
    compiler.tape.rope_angles(list(attrs.frequencies), attrs.scale, cos.buffer, sin.buffer)


def rmsnorm(compiler: Compiler, op: Op, attrs: dense.NormAttrs) -> None:
    (x,) = compiler.inputs(op)
    compiler.tape.normalize(compiler.norm(op), x, compiler.output(op), _head_dim(compiler, op.inputs[0]))


layernorm = rmsnorm


def linear(compiler: Compiler, op: Op, attrs: Attrs) -> None:
    _product(compiler, Group(op.kind, op.label, (op,)), [op], compiler.new(op.outputs[0]))


def linear_add(compiler: Compiler, group: Group) -> None:
    linear, add = group.ops[0], group.ops[-1]
    (other,) = (name for name in add.inputs if name != linear.outputs[0])
    residual = compiler.place(other)
    if compiler.can_reuse_buffer(other) and compiler.place(linear.inputs[0]).buffer != residual.buffer:
        _product(compiler, group, [linear], residual, epilogue="add")
        compiler.places[add.outputs[0]] = residual
        return
    out = compiler.new(add.outputs[0])
    _product(compiler, group, [linear], out)
    compiler.tape.add(out.buffer, residual.buffer, out.buffer)


def norm_gated(compiler: Compiler, group: Group) -> None:
    act = group.ops[-1]
    assert isinstance(act.attrs, dense.ActivationAttrs)
    linears = {op.outputs[0]: op for op in _ops(group, "linear")}
    gate_up = [linears[name] for name in act.inputs]
    out, function = compiler.new(act.outputs[0]), act.attrs.function
    _product(compiler, group, gate_up, out, epilogue="gate", activation=function, interleave=True)


def norm_activated(compiler: Compiler, group: Group) -> None:
    linear, act = group.ops[-2:]
    assert isinstance(act.attrs, dense.ActivationAttrs)
    out = compiler.new(act.outputs[0])
    _product(compiler, group, [linear], out, epilogue="activate", activation=act.attrs.function)


def norm_linears(compiler: Compiler, group: Group) -> None:
    linears = _ops(group, "linear")
    names = [op.outputs[0] for op in linears]
    compiler.places |= zip(names, _sliced_product(compiler, group, linears, names[0]), strict=True)


def _sliced_product(compiler: Compiler, group: Group, linears: Sequence[Op], name: str) -> list[Place]:
    """Emit the product of all `linears` to a place of value `name`; return the columns of each."""
    sizes = [compiler.program.weights[op.weights[0]][0] for op in linears]
    out = compiler.new(name, sum(sizes))
    _product(compiler, group, linears, out)
    return [compiler.slice(out, sum(sizes[:part]), size) for part, size in enumerate(sizes)]


def norm_head(compiler: Compiler, group: Group) -> None:
    (head,) = _ops(group, "lm_head")
    norm = _leading_norm(group, head)
    select = _ops(group, "select_rows")
    x = compiler.place((select[0] if select else norm or head).inputs[0])
    softcap = _ops(group, "softcap")
    cap = softcap[0].attrs.cap if softcap and isinstance(softcap[0].attrs, dense.SoftcapAttrs) else 0.0
    matrix, bias = compiler.matrix([head])
    compiler.tape.linear(matrix, compiler.norm(norm), x.buffer, None, select=bool(select), bias=bias, softcap=cap)


def norm_qkv(compiler: Compiler, group: Group) -> None:
    write = group.ops[-1] if group.ops[-1].kind == "kv_write" else _ops(group, "kv_write")[0]
    assert isinstance(write.attrs, CacheWriteAttrs)
    chains = {chain[-1].outputs[0]: chain for chain in (_chain(group, op) for op in _ops(group, "linear"))}
    keys, values = (chains.pop(name) for name in write.inputs)
    ((q_name, queries),) = chains.items()
    q, k, v = _sliced_product(compiler, group, [chain[0] for chain in (queries, keys, values)], q_name)
    compiler.places[q_name] = q
    memory, cache_group = compiler.cache.kv[write.attrs.state]
    at_once = [_emit_but_last_steps(compiler, chain[1:], place) for chain, place in ((queries, q), (keys, k))]
    q_norm, k_norm = (compiler.norm(next((op for op in steps if op.kind in dense.NORMS), None)) for steps in at_once)
    ropes = [op for op in at_once[0] if op.kind == "rope"]
    rotation = _rotation(compiler, ropes[0]) if ropes else (None, None, False, 0)
    compiler.tape.heads(q.buffer, k.buffer, v.buffer, memory, cache_group, q_norm, k_norm, *rotation)


def norm_q(compiler: Compiler, group: Group) -> None:
    linear, *steps = _chain(group, _ops(group, "linear")[0])
    q = compiler.new(steps[-1].outputs[0])
    _product(compiler, group, [linear], q)
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
        if op.kind in dense.NORMS:
            compiler.tape.normalize(compiler.norm(op), place.buffer, place.buffer, head_dim)
        elif op.kind == "rope":
            compiler.tape.rotate(place.buffer, place.buffer, head_dim, *_rotation(compiler, op))


def _rotation(compiler: Compiler, rope: Op) -> tuple[int, int, bool, int]:
    """Return cos, sin, whether neighbours turn against each other, and the first entry that turns."""
    assert isinstance(rope.attrs, RopeAttrs)
    cos, sin = (compiler.place(name).buffer for name in rope.inputs[1:])
    return cos, sin, rope.attrs.interleaved, rope.attrs.offset


def rope(compiler: Compiler, op: Op, attrs: RopeAttrs) -> None:
    x = compiler.place(op.inputs[0])
    out = x if compiler.can_reuse_buffer(op.inputs[0]) else compiler.new(op.outputs[0])
    compiler.places[op.outputs[0]] = out
    compiler.tape.rotate(x.buffer, out.buffer, _head_dim(compiler, op.inputs[0]), *_rotation(compiler, op))


def kv_write(compiler: Compiler, op: Op, attrs: CacheWriteAttrs) -> None:
    k, v = (compiler.place(name).buffer for name in op.inputs)
    memory, cache_group = compiler.cache.kv[attrs.state]
    compiler.tape.heads(None, k, v, memory, cache_group, _native.Norm(), _native.Norm())


def _head_dim(compiler: Compiler, name: str) -> int:
    """Return the entries of each head of value `name`, 0 where it has no heads."""
    dims = dims_of(compiler.program.shapes[name])
    return dims[-1] if len(dims) == 2 else 0


def _chain(group: Group, linear: Op) -> list[Op]:
    """Return `linear` and the ops of the group that follow from it alone, in order."""
    chain = [linear]
    for op in group.ops:
        if op.inputs[:1] == chain[-1].outputs and op.outputs:
            chain.append(op)
    return chain


def attention(compiler: Compiler, op: Op, attrs: AttentionAttrs) -> None:
    q, out = compiler.place(op.inputs[0]), compiler.output(op)
    memory, cache_group = compiler.cache.kv[attrs.state]
    slopes, state = attrs.alibi_slopes, compiler.program.states[attrs.state]
    assert isinstance(state, KvState)
    sinks, at = compiler.vector(op.weights[0]) if op.weights else 0, 0
    if slopes:
        at = compiler.weights.vector(f"{op.label}.slopes", lambda: np.array(slopes, np.float32))
    how = (q.width // state.head_dim, attrs.scale, attrs.window or 0, attrs.softcap or 0.0)
    wide = compiler.settings.multiplies_bf16_in_float32
    spec = _native.AttentionSpec(*how, sinks=sinks, slopes=at, float32=wide)
    compiler.tape.attention(spec, memory, cache_group, q.buffer, out)


def split_heads(compiler: Compiler, op: Op, attrs: Attrs) -> None:
    """Name the same memory differently; emit nothing."""
    compiler.places[op.outputs[0]] = compiler.place(op.inputs[0])


def slice(compiler: Compiler, op: Op, attrs: dense.SliceAttrs) -> None:
    """Name columns of the same memory; emit nothing."""
    compiler.places[op.outputs[0]] = compiler.slice(compiler.place(op.inputs[0]), attrs.offset, attrs.size)


def scale(compiler: Compiler, op: Op, attrs: dense.ScaleAttrs) -> None:
    (x,) = compiler.inputs(op)
    compiler.tape.scale(attrs.factor, x, compiler.output(op))


def concat(compiler: Compiler, op: Op, attrs: Attrs) -> None:
    out, offset = compiler.new(op.outputs[0]), 0
    for name in op.inputs:
        x = compiler.place(name)
        compiler.tape.scale(1.0, x.buffer, compiler.slice(out, offset, x.width).buffer)
        offset += x.width


def add(compiler: Compiler, op: Op, attrs: Attrs) -> None:
    x, y = compiler.inputs(op)
    compiler.tape.add(x, y, compiler.output(op))


def add_row(compiler: Compiler, op: Op, attrs: dense.AddRowAttrs) -> None:
    (table,), row = op.weights, attrs.row
    address = compiler.weights.vector(f"{table}.{row}", lambda: compiler.weights.tensor(table)[row])
    (x,) = compiler.inputs(op)
    compiler.tape.add_row(x, address, compiler.output(op))


def activation(compiler: Compiler, op: Op, attrs: dense.ActivationAttrs) -> None:
    (x,) = compiler.inputs(op)
    compiler.tape.activate(attrs.function, x, compiler.output(op))


def softcap(compiler: Compiler, op: Op, attrs: dense.SoftcapAttrs) -> None:
    (x,) = compiler.inputs(op)
    compiler.tape.softcap(attrs.cap, x, compiler.output(op))


def gated_activation(compiler: Compiler, op: Op, attrs: dense.ActivationAttrs) -> None:
    gate, up = compiler.inputs(op)
    compiler.tape.gate(attrs.function, gate, up, compiler.output(op))


def select_rows(compiler: Compiler, op: Op, attrs: Attrs) -> None:
    assert op.inputs[1] == LOGIT_ROWS
    compiler.tape.select(compiler.place(op.inputs[0]).buffer, compiler.output(op))


def lora(compiler: Compiler, op: Op, attrs: Attrs) -> None:
    x, y = (compiler.place(name).buffer for name in op.inputs[:2])
    a, b = op.weights
    count, rank, _ = compiler.program.weights[a]
    compiler.tape.lora(x, y, compiler.output(op), compiler.vector(a), compiler.vector(b), count, rank)


def _emitter(file: str, kind: str) -> Emitter:
    emit = getattr(import_module(f"{__package__}.{file}"), kind)

    def emit_op(compiler: Compiler, group: Group) -> None:
        (op,) = group.ops
        emit(compiler, op, op.attrs)

    return emit_op if kind in OPSET else emit


EMITTERS: Mapping[str, Emitter] = {kind: _emitter(file, kind) for file, each in KINDS_BY_FILE.items() for kind in each}
