"""What a step of a program costs, op by op, and what its weights and KV memory weigh.

The rules are the op table's; this gives them concrete sizes. Called by `ridgeline inspect`. Must not import torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from ridgeline.program.op import Op, Program, Shape
from ridgeline.program.opset import OPSET, ElementBytes, Load, OpCost, Operands, elements


@dataclass(frozen=True, slots=True)
class OpAccount:
    """One op of the program and what it costs in one step."""

    op: Op
    cost: OpCost

    @property
    def label(self) -> str:
        return self.op.label


@dataclass(frozen=True, slots=True)
class KvGroup:
    """The KV states of equal window: how many they are and what they keep of one token, all together."""

    window: int | None
    num_states: int
    bytes_per_token: int

    @property
    def kind(self) -> str:
        return "full" if self.window is None else "sliding"

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes for a sequence of `num_tokens`: of a window, only what the next token can still see and itself."""
        kept = num_tokens if self.window is None else min(num_tokens, self.window)
        return kept * self.bytes_per_token


def account(program: Program, load: Load, element: ElementBytes = ElementBytes()) -> list[OpAccount]:  # noqa: B008
    """The cost of every op of `program` for a step that computes `load`, in the order of computation."""
    sizes = {"T": load.num_tokens, "R": load.num_rows}

    def concrete(shape: Shape) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in shape)

    accounts: list[OpAccount] = []
    for op in program.ops:
        operands = Operands(
            attrs=op.attrs,
            inputs=tuple(concrete(program.shapes[name]) for name in op.inputs),
            outputs=tuple(concrete(program.shapes[name]) for name in op.outputs),
            weights=tuple(program.weights[name] for name in op.weights),
            load=load,
            element=element,
        )
        accounts.append(OpAccount(op, OPSET[op.kind].cost(operands)))
    return accounts


def total(accounts: Iterable[OpAccount]) -> OpCost:
    """The sum of the costs."""
    return reduce(OpCost.__add__, (item.cost for item in accounts), OpCost())


def kv_groups(program: Program, element_bytes: int) -> Sequence[KvGroup]:
    """The program's KV states by window, full attention first; `element_bytes` per key or value entry."""
    windows = sorted({state.window for state in program.states}, key=lambda window: (window is not None, window or 0))
    members = [[state for state in program.states if state.window == window] for window in windows]
    return [
        KvGroup(window, len(states), sum(state.bytes_per_token(element_bytes) for state in states))
        for window, states in zip(windows, members)
    ]


def kv_bytes_per_token(program: Program, element_bytes: int) -> int:
    """Bytes that all layers together keep of one token, while no window has passed it."""
    return sum(state.bytes_per_token(element_bytes) for state in program.states)


def kv_bytes(program: Program, num_tokens: int, element_bytes: int) -> int:
    """Bytes that a sequence of `num_tokens` needs in the cache, whole blocks and spans in flight not counted."""
    return sum(group.num_bytes(num_tokens) for group in kv_groups(program, element_bytes))


def weight_bytes(program: Program, element_bytes: float) -> float:
    """Bytes of all weights; a tied head counts once."""
    return program.num_parameters * element_bytes


def embedding_parameters(program: Program) -> int:
    """Parameters of the tables that token ids and positions look up; a tied head's matrix is among them."""
    tables = {name for op in program.ops if op.kind == "embed" for name in op.weights}
    return sum(elements(program.weights[name]) for name in tables)


def head_parameters(program: Program) -> int:
    """Parameters of the output projection that are not the embedding's."""
    heads = {name for op in program.ops if op.kind == "lm_head" for name in op.weights}
    tables = {name for op in program.ops if op.kind == "embed" for name in op.weights}
    return sum(elements(program.weights[name]) for name in heads - tables)
