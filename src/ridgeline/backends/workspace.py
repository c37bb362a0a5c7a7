"""How much memory a native step takes beside weights and cache, before anything is built: an upper bound.

Says once more, in sizes, what `native/runtime` reserves: rows between instructions, inputs as matrix products read
them, the rows of experts, queries and partial sums of attention. Tests hold it to what a tape has really allocated.
Called by `select.py`. Must not import torch or the native module.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ridgeline.program.op import LOGITS, KvState, Op, Program, RecurrentState, State
from ridgeline.program.ops.attention import AttentionAttrs
from ridgeline.program.ops.latent import LatentSizes
from ridgeline.program.passes.fuse import MATRIX_OPS, Group, fuse
from ridgeline.program.pricing import FLOAT32_BYTES

PANEL = 32
FIXED_PART_KEYS = 1024  # of a deterministic attention's partial sums
EXPANDED_PART_TOKENS, MAX_EXPANDED_PARTS = 1024, 8  # of latents that a head expands at once, and of a context
BLOCK_ROWS = 64  # rows of latents or queries that are multiplied together
WIDE_KINDS = ("norm_qkv", "norm_linears", "norm_q")  # groups whose linears are one matrix product
VIEW_KINDS = ("split_heads", "slice")
RECURRENT_CHUNK = 64  # tokens
INPUT_SLACK = 2304  # of native/kernels/types.h
FIXED_SCRATCH = 2 << 20  # of a worker, for matrix products and attention


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: tokens, rows that need logits, sequences, and the longest context; and who computes it."""

    num_tokens: int
    num_rows: int
    num_seqs: int
    context: int
    num_threads: int
    deterministic: bool

    def rows(self, of: str | int) -> int:
        """Of values with a row for each token ("T"), or for each row that needs logits ("R")."""
        return self.num_tokens if of == "T" else self.num_rows


def workspace_bytes(program: Program, limits: StepLimits) -> int:
    """At most what the largest step allocates, its logits included."""
    experts = max((_experts_bytes(program, op, limits) for op in program.ops if op.kind == "experts"), default=0)
    attentions = {key: num_bytes for op in program.ops for key, num_bytes in _attention_bytes(program, op, limits)}
    return (
        _values_bytes(program, limits)
        + _inputs_bytes(program, limits)
        + experts
        + sum(attentions.values())
        + limits.num_threads * scratch_bytes(program)
        + limits.num_rows * _panels(program.vocab_size) * FLOAT32_BYTES
    )


def _values_bytes(program: Program, limits: StepLimits) -> int:
    """Rows between groups. As the compiler does it, memory is used again for values as wide as what was there."""
    groups = fuse(program)
    last = {name: at for at, group in enumerate(groups) for op in group.ops for name in op.inputs}
    last[program.result] = len(groups)
    memory_of: dict[str, str] = {}  # value -> what names its memory
    users: dict[str, set[str]] = {}  # memory -> the values in it that are still read
    kinds: dict[str, tuple[str | int, int]] = {}  # memory -> whose rows it has, and their width
    free: dict[tuple[str | int, int], int] = {}
    total = 0
    for at, group in enumerate(groups):
        for name, memory, width in _made(program, group, memory_of):
            if memory not in kinds:
                kind = kinds[memory] = (program.shapes[name][0], width)
                if free.get(kind):
                    free[kind] -= 1
                else:
                    total += limits.rows(kind[0]) * _panels(width) * FLOAT32_BYTES
            memory_of[name] = memory
            users.setdefault(memory, set()).add(name)
        for name in {name for op in group.ops for name in (*op.inputs, *op.outputs)} & memory_of.keys():
            memory = memory_of[name]
            if last.get(name, -1) <= at and name in users[memory]:
                users[memory].remove(name)
                if not users[memory]:
                    free[kinds[memory]] = free.get(kinds[memory], 0) + 1
    return total


def _made(program: Program, group: Group, memory_of: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    """(name, memory, width) of the values that a group leaves behind."""
    if group.kind in WIDE_KINDS:
        width = sum(program.weights[op.weights[0]][0] for op in group.ops if op.kind == "linear")
        norms = {op.outputs[0] for op in group.ops[:1] if op.kind != "linear"}
        for name in (name for op in group.ops for name in op.outputs if name not in norms):
            yield name, group.label, width
        return
    op = group.ops[-1]
    for name in op.outputs:
        if name != LOGITS:
            memory = memory_of[op.inputs[0]] if op.kind in VIEW_KINDS else name
            yield name, memory, prod(dim for dim in program.shapes[name][1:] if isinstance(dim, int))


def _inputs_bytes(program: Program, limits: StepLimits) -> int:
    """The inputs of the largest matrix product; of few rows every worker has its own."""
    matrices = [op for op in program.ops if op.kind in MATRIX_OPS]
    few = 4 * limits.num_threads
    return max(
        max(few, limits.rows(program.shapes[op.inputs[0]][0])) * _input_bytes(program.weights[op.weights[0]][-1])
        for op in matrices
    ) + (INPUT_SLACK * limits.num_threads)


def _input_bytes(width: int) -> int:
    """A row as a matrix product reads it: at most float32, and scales are fewer than what integers spare."""
    return 4 * _up(width, 256) + 512


def _experts_bytes(program: Program, op: Op, limits: StepLimits) -> int:
    """A row for every token and each of its experts: routed, as inputs, between the two products, and behind them."""
    num_experts, size, width = program.weights[op.weights[0]]
    top_k = program.shapes[op.inputs[1]][1]
    assert isinstance(top_k, int)
    rows = limits.num_tokens * top_k
    hit = min(num_experts, rows)
    hidden, results = _panels(size + PANEL) * FLOAT32_BYTES, _panels(width) * FLOAT32_BYTES
    inputs = rows * _input_bytes(max(size, width)) + INPUT_SLACK * hit + limits.num_threads * _input_bytes(width)
    routing = 8 * (2 * hit + 2 * rows + num_experts + 16) * limits.num_threads
    return rows * (hidden + results) + inputs + routing


def _attention_bytes(program: Program, op: Op, limits: StepLimits) -> Iterator[tuple[object, int]]:
    """What an attention op takes beside its rows; those that share it have the same key."""
    match op.kind:
        case "attention":
            assert isinstance(op.attrs, AttentionAttrs)
            state = program.states[op.attrs.state]
            assert isinstance(state, KvState)
            num_heads = program.shapes[op.inputs[0]][1]
            assert isinstance(num_heads, int)
            key = (num_heads, state, op.attrs.window)
            yield key, _partial_bytes(num_heads, num_heads // state.num_heads, state.head_dim, op.attrs.window, limits)
        case "latent_attention":
            sizes = LatentSizes.of_op(program, op)
            partials = _partial_bytes(sizes.num_heads, sizes.num_heads, sizes.latent_dim, None, limits)
            yield sizes, partials + _latent_bytes(sizes, limits)
        case _:
            return


def _partial_bytes(num_heads: int, group: int, value_dim: int, window: int | None, limits: StepLimits) -> int:
    """Sums over parts of the keys: of every row where a row's parts must not depend on the step, else of a few."""
    row = FLOAT32_BYTES * (2 + value_dim)
    if not limits.deterministic:
        return 9 * limits.num_threads * (max(BLOCK_ROWS, group) * row + 64)
    keys = limits.context if window is None else min(limits.context, window + 2 * BLOCK_ROWS + FIXED_PART_KEYS)
    parts = -(-keys // FIXED_PART_KEYS)
    blocks = num_heads // group * (limits.num_tokens + limits.num_seqs)
    return parts * (limits.num_tokens * num_heads * row + 64 * blocks)


def _latent_bytes(sizes: LatentSizes, limits: StepLimits) -> int:
    """Queries against latents and sums of latents of spans that absorb; latents laid out of spans that expand."""
    heads, latent, rope = sizes.num_heads, sizes.latent_dim, sizes.rope_dim
    absorbed = limits.num_tokens * heads * (2 * latent + rope) * FLOAT32_BYTES
    widest = max(_panels(latent) + rope, _panels(sizes.nope_dim) + _panels(sizes.value_dim))
    worker = BLOCK_ROWS * (_input_bytes(max(latent, sizes.nope_dim)) + widest * FLOAT32_BYTES) + 256
    if limits.deterministic:
        return absorbed + limits.num_threads * worker
    part = max(EXPANDED_PART_TOKENS, _up(-(-limits.context // MAX_EXPANDED_PARTS), BLOCK_ROWS))
    worker += part * (_panels(sizes.nope_dim + rope) + _panels(sizes.value_dim)) * FLOAT32_BYTES
    worker += MAX_EXPANDED_PARTS * limits.num_tokens * (2 + sizes.value_dim) * FLOAT32_BYTES
    laid_out = _expanded_tokens(sizes, limits) * (_input_bytes(latent) + rope * FLOAT32_BYTES + 1)
    return absorbed + laid_out + limits.num_threads * worker


def _expanded_tokens(sizes: LatentSizes, limits: StepLimits) -> int:
    """Of contexts that one step expands: the longer a context, the more tokens a span needs for it to pay."""
    shortest = next((n for n in range(1, limits.num_tokens + 1) if sizes.expands(n, limits.context)), None)
    spans = 1 if shortest is None else max(1, limits.num_tokens // shortest)
    return spans * limits.context + limits.num_seqs * BLOCK_ROWS


def scratch_bytes(program: Program) -> int:
    """One worker's: to draw a token, or for a chunk of a recurrence, whichever is more."""
    recurrent = max((FLOAT32_BYTES * _recurrence_floats(state) for state in program.states), default=0)
    return FIXED_SCRATCH + 24 * program.vocab_size + recurrent


def _recurrence_floats(state: State) -> int:
    """One head's state, and a chunk of what it is made of."""
    if not isinstance(state, RecurrentState):
        return 0
    heads = [(_panels(part[1]), _panels(part[2])) for part in state.parts if len(part) == 3]
    return max((RECURRENT_CHUNK * (3 * (a + b) + 4 * RECURRENT_CHUNK) + a * b for a, b in heads), default=0)


def _panels(width: int) -> int:
    return _up(width, PANEL)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
