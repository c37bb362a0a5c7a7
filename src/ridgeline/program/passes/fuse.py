"""Fuse the ops of a Program into groups that a backend may run as one kernel.

Pattern matching on who produces and who consumes a value; no model is known by name. Called by backends, `cost/` and
`ridgeline inspect`. A group means its ops one after the other, so a backend may run any group op by op. No torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.program.op import LOGITS, Op, Program
from ridgeline.program.ops.attention import AttentionAttrs, CacheWriteAttrs
from ridgeline.program.ops.dense import MATRIX_OPS, NORMS

# With what each kind of group holds, parts in brackets where the program has them.
GROUP_KINDS: Mapping[str, str] = {
    "norm_qkv": "[norm], linears of q, k and v, their heads, [norms and rope of q and k], kv_write",
    "norm_q": "[norm], linear of q, its heads, [norm and rope of q]: of an attention to another layer's keys",
    "attention": "attention",
    "linear_add": "linear, add onto the residual",
    "norm_gated": "[norm], linears of gate and up, gated_activation",
    "norm_activated": "[norm], linear, activation",
    "norm_head": "[select_rows], [norm], lm_head, [softcap]",
    "norm_linears": "[norm], two or more linears of the same input that are in none of the above",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Ops in the program's order. `kind` is one of GROUP_KINDS, or of a group of one op the op's own kind.

    `label` is that of the group's first matrix product, where it has one.
    """

    kind: str
    label: str
    ops: tuple[Op, ...]


def fuse(program: Program) -> tuple[Group, ...]:
    """Return every op of `program` in exactly one group, the groups in an order that can be executed.

    All that leaves a group is made by its last op, but for the q, k and v of a norm_qkv, which only attentions read
    that come after all of its ops. Groups in the order of their last ops therefore run after what they read. A
    norm_linears reads one value, made before any of its ops: it has the place of its first one.
    """
    flow = _Dataflow(program)
    grouped: set[str] = set()
    groups: list[Group] = []
    for op in program.ops:
        matcher = _MATCHERS.get(op.kind)
        match = matcher(flow, op) if matcher else None
        if match is not None:
            kind, members = match
            members = sorted(members, key=flow.position)
            assert not grouped.intersection(member.label for member in members)
            grouped.update(member.label for member in members)
            groups.append(Group(kind, _label(members), tuple(members)))
    for members in _linears(flow, [op for op in program.ops if op.label not in grouped]):
        grouped.update(member.label for member in members)
        groups.append(Group("norm_linears", _label(members), tuple(members)))
    groups += [Group(op.kind, op.label, (op,)) for op in program.ops if op.label not in grouped]
    return tuple(sorted(groups, key=lambda group: flow.position(group.ops[0 if group.kind == "norm_linears" else -1])))


def _label(ops: Sequence[Op]) -> str:
    return next((op.label for op in ops if op.kind in MATRIX_OPS), ops[0].label)


class _Dataflow:
    """Who makes a value and who reads it."""

    def __init__(self, program: Program) -> None:
        self._position = {op.label: at for at, op in enumerate(program.ops)}
        self._producer: dict[str, Op] = {name: op for op in program.ops for name in op.outputs}
        self._consumers: dict[str, list[Op]] = {}
        self._retained = {LOGITS, *program.taps}
        for op in program.ops:
            for name in dict.fromkeys(op.inputs):
                self._consumers.setdefault(name, []).append(op)

    def position(self, op: Op) -> int:
        """Return where in the program `op` stands."""
        return self._position[op.label]

    def consumers(self, name: str) -> list[Op]:
        return self._consumers.get(name, [])

    def next(self, op: Op, kind: str) -> Op | None:
        """Return the op of `kind` that alone reads what `op` alone makes."""
        if len(op.outputs) != 1 or op.outputs[0] in self._retained:
            return None
        consumers = self.consumers(op.outputs[0])
        return consumers[0] if len(consumers) == 1 and consumers[0].kind == kind else None

    def source(self, name: str, kinds: Sequence[str], readers: Sequence[Op]) -> Op | None:
        """Return the op of one of `kinds` that makes `name`, where nobody but `readers` reads it."""
        op = self._producer.get(name)
        if op is None or op.kind not in kinds or len(op.outputs) != 1 or name in self._retained:
            return None
        labels = {reader.label for reader in readers}
        return op if all(consumer.label in labels for consumer in self.consumers(name)) else None

    def with_norm(self, readers: Sequence[Op]) -> list[Op]:
        """Return `readers`, and the norm whose output only they read."""
        norm = self.source(readers[0].inputs[0], NORMS, readers)
        return [norm, *readers] if norm else list(readers)


_Match = tuple[str, list[Op]]


def _qkv(flow: _Dataflow, write: Op) -> _Match | None:
    """Match from a kv_write back to the three linears; the queries are those of the first attention that reads it."""
    assert isinstance(write.attrs, CacheWriteAttrs)
    k, v = write.inputs
    readers = [op for op in (*flow.consumers(k), *flow.consumers(v)) if op.label != write.label]
    if k == v or not readers or not all(_attends(flow, op, write) for op in readers):
        return None
    attention = readers[0]
    chains = (
        _heads(flow, attention.inputs[0], [attention], rotated=True),
        _heads(flow, k, [write, *readers], rotated=True),
        _heads(flow, v, [write, *readers], rotated=False),
    )
    ops = [op for chain in chains for op in chain]
    linears = [chain[0] for chain in chains if chain]
    if len(linears) != 3 or len({op.label for op in ops}) != len(ops) or len({op.inputs[0] for op in linears}) != 1:
        return None
    if _steps(chains[0]) != _steps(chains[1]):
        return None
    return "norm_qkv", [*flow.with_norm(linears)[:-3], *ops, write]


def _steps(chain: Sequence[Op]) -> list[object]:
    """Return what must be the same of queries and keys: their steps in order, and the angles that they rotate by."""
    return [(op.kind, op.inputs[1:], op.attrs) if op.kind == "rope" else op.kind for op in chain]


def _attends(flow: _Dataflow, op: Op, write: Op) -> bool:
    """Return whether `op` reads what `write` wrote, from the cache."""
    assert isinstance(write.attrs, CacheWriteAttrs)
    return (
        isinstance(op.attrs, AttentionAttrs)
        and op.attrs.state == write.attrs.state
        and op.inputs[1:] == write.inputs
        and op.inputs[0] not in write.inputs
        and flow.position(op) > flow.position(write)
    )


def _heads(flow: _Dataflow, name: str, readers: Sequence[Op], *, rotated: bool) -> list[Op]:
    """Match linear and split_heads, with a norm and a rope if `rotated`; nothing but the end is read elsewhere.

    Empty where `name` is made otherwise.
    """
    chain: list[Op] = []
    kinds = {"linear", "split_heads", *(("rope", *NORMS) if rotated else ())}
    while (op := flow.source(name, tuple(kinds), readers)) is not None:
        chain.insert(0, op)
        if op.kind == "linear":
            break
        kinds -= set(NORMS if op.kind in NORMS else (op.kind,))
        name, readers = op.inputs[0], [op]
    return chain if op is not None and "split_heads" not in kinds else []


def _q(flow: _Dataflow, attention: Op) -> _Match | None:
    """Return the queries of an attention that is not the first to what it reads: no norm_qkv has them."""
    first = next(op for op in flow.consumers(attention.inputs[1]) if op.kind == "attention")
    queries = _heads(flow, attention.inputs[0], [attention], rotated=True)
    if first.label == attention.label or not queries:
        return None
    return "norm_q", [*flow.with_norm(queries[:1])[:-1], *queries]


def _linear_add(flow: _Dataflow, add: Op) -> _Match | None:
    """Match two linears and their sum: the later linear is added onto the other's output."""
    x, y = add.inputs
    linears = [op for op in (flow.source(name, ("linear",), [add]) for name in (x, y)) if op]
    return ("linear_add", [max(linears, key=flow.position), add]) if linears and x != y else None


def _gated(flow: _Dataflow, act: Op) -> _Match | None:
    gate, up = (flow.source(name, ("linear",), [act]) for name in act.inputs)
    if gate is None or up is None or gate.label == up.label or gate.inputs != up.inputs:
        return None
    return "norm_gated", [*flow.with_norm([gate, up]), act]


def _activated(flow: _Dataflow, act: Op) -> _Match | None:
    linear = flow.source(act.inputs[0], ("linear",), [act])
    return ("norm_activated", [*flow.with_norm([linear]), act]) if linear else None


def _head(flow: _Dataflow, head: Op) -> _Match | None:
    ops = flow.with_norm([head])
    rows = flow.source(ops[0].inputs[0], ("select_rows",), [ops[0]])
    softcap = flow.next(head, "softcap")
    return "norm_head", [*([rows] if rows else []), *ops, *([softcap] if softcap else [])]


def _linears(flow: _Dataflow, ops: Sequence[Op]) -> Iterator[list[Op]]:
    """Match linears of the same input, with its norm, but for routers: those are not stored as other matrices are."""
    of_input: dict[str, list[Op]] = {}
    for op in ops:
        if op.kind == "linear" and not any(reader.kind == "route" for reader in flow.consumers(op.outputs[0])):
            of_input.setdefault(op.inputs[0], []).append(op)
    return (flow.with_norm(linears) for linears in of_input.values() if len(linears) > 1)


_MATCHERS: Mapping[str, Callable[[_Dataflow, Op], _Match | None]] = {
    "kv_write": _qkv,
    "attention": _q,
    "add": _linear_add,
    "gated_activation": _gated,
    "activation": _activated,
    "lm_head": _head,
}
