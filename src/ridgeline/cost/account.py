"""Count the parameters of a program, and the memory of its weights and of its KV cache."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.program.op import KvState, Program, RecurrentState, dims_of
from ridgeline.program.ops.attention import AttentionAttrs
from ridgeline.program.opset import float32_weights
from ridgeline.program.pricing import FLOAT32_BYTES, elements


@dataclass(frozen=True, slots=True)
class KvGroup:
    """States cached in the same way: their number, and their bytes per token or per sequence, together."""

    kind: Literal["full", "sliding", "recurrent"]
    window: int | None
    num_states: int
    bytes_per_token: int
    bytes_per_sequence: int

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes for a sequence of `num_tokens`: of a window, what the next token sees and itself."""
        num_cached = num_tokens if self.window is None else min(num_tokens, self.window)
        return num_cached * self.bytes_per_token + self.bytes_per_sequence


def kv_groups(program: Program, element_bytes: float) -> Sequence[KvGroup]:
    """Return the program's states by what they keep: all tokens, a window of them, or one value for the whole sequence.

    `element_bytes` per key, value or latent entry; recurrent states are float32.
    """
    per_token = [state for state in program.states if not isinstance(state, RecurrentState)]
    groups: list[KvGroup] = []
    for window in sorted({state.window for state in per_token}, key=lambda window: (window is not None, window or 0)):
        members = [state.bytes_per_token(element_bytes) for state in per_token if state.window == window]
        groups.append(KvGroup("full" if window is None else "sliding", window, len(members), sum(members), 0))
    recurrent = [state.num_bytes for state in program.states if isinstance(state, RecurrentState)]
    if recurrent:
        groups.append(KvGroup("recurrent", None, len(recurrent), 0, sum(recurrent)))
    return groups


@dataclass(frozen=True, slots=True)
class SharedKv:
    """Saving by layers that share the keys and values of others: the number of such layers, and bytes per token."""

    num_layers: int
    bytes_per_token: int


def shared_kv(program: Program, element_bytes: float) -> SharedKv:
    """Find what attentions after the first one of a state need not compute themselves."""
    readers = Counter(op.attrs.state for op in program.ops if isinstance(op.attrs, AttentionAttrs))
    spared = [(program.states[state], count - 1) for state, count in readers.items()]
    cached = ((state, count) for state, count in spared if isinstance(state, KvState))
    num_bytes = sum(count * state.bytes_per_token(element_bytes) for state, count in cached)
    return SharedKv(sum(count for _, count in spared), num_bytes)


def kv_bytes_per_token(program: Program, element_bytes: float) -> int:
    """Return the bytes that all layers together keep of one token, while no window has passed it."""
    return sum(group.bytes_per_token for group in kv_groups(program, element_bytes))


def kv_bytes(program: Program, num_tokens: int, element_bytes: float) -> int:
    """Return the bytes of a sequence of `num_tokens` in the cache, without padding to blocks or spans in flight."""
    return sum(group.num_bytes(num_tokens) for group in kv_groups(program, element_bytes))


def weight_bytes(program: Program, element_bytes: float) -> float:
    """Return the bytes of all weights: float32 where their ops say so, else `element_bytes` each.

    A tied head counts once.
    """
    wide = sum(elements(program.weights[name]) for name in float32_weights(program))
    return (program.num_parameters - wide) * element_bytes + wide * FLOAT32_BYTES


def active_parameters(program: Program) -> int:
    """Return the parameters that one token uses: all but those of the experts that it is not sent to."""
    idle = 0
    for op in program.ops:
        if op.kind == "experts":
            (top_k,) = dims_of(program.shapes[op.inputs[1]])
            for name in op.weights:
                num_experts, *expert = program.weights[name]
                idle += (num_experts - top_k) * elements(expert)
    return program.num_parameters - idle


def embedding_parameters(program: Program) -> int:
    """Return the parameters of the tables that token ids and positions look up; a tied head's matrix is among them."""
    tables = {name for op in program.ops if op.kind == "embed" for name in op.weights}
    return sum(elements(program.weights[name]) for name in tables)


def head_parameters(program: Program) -> int:
    """Return the parameters of the output projection that are not the embedding's."""
    heads, tables = ({name for op in program.ops if op.kind == k for name in op.weights} for k in ("lm_head", "embed"))
    return sum(elements(program.weights[name]) for name in heads - tables)
