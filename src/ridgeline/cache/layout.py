"""How the bytes of the KV cache are cut: block size, groups of KV states, blocks per group."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.core.errors import ConfigError

MAX_BLOCK_SIZE = 256
RECURRENT_PEAK_BLOCKS = 2  # of a sequence: the state it works on, and the checkpoint that it was copied from
LOG_SPANS = 2  # that a log has room for: one is written while the one before it is read
RECURRENT_BLOCKS_PER_SEQUENCE = 4  # where memory allows: checkpoints of earlier sequences make prefix hits


@dataclass(frozen=True, slots=True)
class KvStateSize:
    """One KV state of the program: its bytes per token (K and V), and its window in tokens (None: sees everything)."""

    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class RecurrentStateSize:
    """One recurrent state of the program: its bytes for a whole sequence, and those of a token in its log."""

    num_bytes: int
    logged_bytes: int = 0

    def sequence_bytes(self, max_logged: int) -> int:
        """Return the bytes with a log for spans of up to `max_logged` tokens."""
        return self.num_bytes + LOG_SPANS * max_logged * self.logged_bytes


StateSize = KvStateSize | RecurrentStateSize


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """States that are allocated, shared and freed together, `num_blocks` blocks of them.

    `states` are indices of the program's states; `bytes_per_token` is their sum. A query at position p of a sliding
    group sees the keys in (p - window, p]. A block of a recurrent group is no run of tokens but the state after some
    number of them, `bytes_per_sequence` large with a log behind it: of spans with up to `max_logged` tokens any number
    may be accepted. Raises ConfigError for values that describe no memory.
    """

    kind: Literal["full", "sliding", "recurrent"]
    states: tuple[int, ...]
    window: int | None
    bytes_per_token: int
    num_blocks: int
    bytes_per_sequence: int = 0
    max_logged: int = 0

    @property
    def log_rows(self) -> int:
        """Return the tokens that a block's log has room for: position p is in row p % log_rows."""
        return LOG_SPANS * self.max_logged

    def __post_init__(self) -> None:
        if (self.kind == "sliding") != (self.window is not None):
            raise ConfigError(f"cache group {self.kind!r} with window={self.window}: only a sliding group has a window")
        num_bytes = self.bytes_per_sequence if self.kind == "recurrent" else self.bytes_per_token
        size = "bytes_per_sequence" if self.kind == "recurrent" else "bytes_per_token"
        for name, value in (("window", self.window), (size, num_bytes)):
            if value is not None and value < 1:
                raise ConfigError(f"cache group {self.kind!r}: {name} must be at least 1, got {value}")
        if self.num_blocks < 1:
            raise ConfigError(f"cache group {self.kind!r} has {self.num_blocks} blocks; give the KV cache more memory")


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a cache, all with blocks of `block_size` tokens (a power of two, 1 to 256).

    `max_span_tokens` is the most tokens that one step adds to one sequence (None: up to a whole prompt); it bounds what
    a sliding group holds at once. Raises ConfigError for a block size or a span that cannot be honoured.
    """

    block_size: int
    groups: tuple[GroupLayout, ...]
    max_span_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two from 1 to {MAX_BLOCK_SIZE}, got {self.block_size}")
        if self.max_span_tokens is not None and self.max_span_tokens < 1:
            raise ConfigError(f"max_span_tokens must be at least 1, got {self.max_span_tokens}")

    def block_bytes(self, group: int) -> int:
        """Return the bytes of one block of `group`."""
        return self.block_size * self.groups[group].bytes_per_token + self.groups[group].bytes_per_sequence

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks of all groups."""
        return sum(self.block_bytes(index) * group.num_blocks for index, group in enumerate(self.groups))

    def peak_blocks(self, group: int, num_tokens: int) -> int:
        """Return the most blocks of `group` that one sequence of `num_tokens` holds at any moment."""
        if self.groups[group].kind == "recurrent":
            return RECURRENT_PEAK_BLOCKS
        return _peak_blocks(self.groups[group].window, num_tokens, self.block_size, self.max_span_tokens)


def plan_layout(
    states: Sequence[StateSize],
    block_size: int,
    budget_bytes: int,
    max_model_len: int,
    max_span_tokens: int,
    max_num_seqs: int = 1,
    max_logged: int = 0,
) -> CacheLayout:
    """Cut `budget_bytes` into groups: full attention first, then equal windows together, recurrent states last.

    Recurrent states get room for `max_num_seqs` sequences and their checkpoints, of what as many sequences leave of the
    budget, or at most half of it. Each other group gets the share of the rest that one sequence of `max_model_len`
    tokens would need of it, so that all run out at about the same time. `max_logged` is that of recurrent groups.
    Raises ConfigError if not even one such sequence fits.
    """
    if max_model_len < 1:
        raise ConfigError(f"max_model_len must be at least 1, got {max_model_len}")
    if not states:
        raise ConfigError("a cache needs at least one group; the program declares no KV state")
    # One sequence's worth of blocks first: this also validates every size.
    groups = tuple(_groups_of_one(states, block_size, max_model_len, max_span_tokens, max_logged))
    single = CacheLayout(block_size, groups, max_span_tokens)
    if budget_bytes < single.total_bytes:
        needs = f"one sequence of max_model_len={max_model_len} needs {single.total_bytes:,} bytes of KV cache"
        what = "lower max_model_len or give the cache more memory"
        raise ConfigError(f"{needs}, but the budget is {budget_bytes:,} bytes; {what}")
    by_token = [group for group in groups if group.kind != "recurrent"]
    recurrent = [_grown(group, budget_bytes, max_num_seqs, single) for group in groups[len(by_token) :]]
    rest_bytes = budget_bytes - sum(group.num_blocks * group.bytes_per_sequence for group in recurrent)
    alone_bytes = sum(single.block_bytes(index) * group.num_blocks for index, group in enumerate(by_token))
    shared = [replace(group, num_blocks=group.num_blocks * rest_bytes // alone_bytes) for group in by_token]
    return CacheLayout(block_size, (*shared, *recurrent), max_span_tokens)


def _grown(group: GroupLayout, budget_bytes: int, max_num_seqs: int, single: CacheLayout) -> GroupLayout:
    """Let a recurrent group of one sequence grow to its share of the budget: to all of it if it is alone."""
    others_bytes = single.total_bytes - group.num_blocks * group.bytes_per_sequence
    if not others_bytes:
        return replace(group, num_blocks=budget_bytes // group.bytes_per_sequence)
    left_bytes = budget_bytes - max_num_seqs * others_bytes
    max_bytes = max(left_bytes, min(budget_bytes // 2, budget_bytes - others_bytes))
    wanted = max_num_seqs * RECURRENT_BLOCKS_PER_SEQUENCE
    return replace(group, num_blocks=max(group.num_blocks, min(wanted, max_bytes // group.bytes_per_sequence)))


def _groups_of_one(
    states: Sequence[StateSize], block_size: int, max_model_len: int, max_span_tokens: int, max_logged: int
) -> Iterator[GroupLayout]:
    """Yield the groups of one sequence: by window, of states that keep something of every token; recurrent ones."""
    found = {index: state for index, state in enumerate(states) if isinstance(state, KvStateSize)}
    windows = sorted({state.window for state in found.values()}, key=lambda window: (window is not None, window or 0))
    for window in windows:
        members = {index: state.bytes_per_token for index, state in found.items() if state.window == window}
        num_blocks = _peak_blocks(window, max_model_len, max(block_size, 1), max_span_tokens)
        kind = "full" if window is None else "sliding"
        yield GroupLayout(kind, tuple(members), window, sum(members.values()), num_blocks)
    recurrent = {index: state for index, state in enumerate(states) if isinstance(state, RecurrentStateSize)}
    if recurrent:
        num_bytes = sum(state.sequence_bytes(max_logged) for state in recurrent.values())
        yield GroupLayout("recurrent", tuple(recurrent), None, 0, RECURRENT_PEAK_BLOCKS, num_bytes, max_logged)


def _peak_blocks(window: int | None, num_tokens: int, block_size: int, max_span_tokens: int | None) -> int:
    """Count blocks for `num_tokens`; with a window: for it, the span being written, and one block of misalignment."""
    if window is not None and max_span_tokens is not None:
        num_tokens = min(num_tokens, window + max_span_tokens + block_size)
    return -(-num_tokens // block_size)
