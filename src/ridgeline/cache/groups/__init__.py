"""The kinds of memory a cache group can be: one file per kind, file name == kind, each with a `build` function.

A kind decides; the manager acts on all groups or on none. Only CacheManager calls this. Must not import the manager.
"""

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from ridgeline.cache.layout import GroupLayout
from ridgeline.cache.pool import BlockPool
from ridgeline.cache.radix import RadixNode
from ridgeline.cache.table import SequenceTable
from ridgeline.core.errors import ConfigError


class Hit(NamedTuple):
    """A prefix of `num_blocks` blocks can be served, from the path's blocks `first_block` on."""

    num_blocks: int
    first_block: int


class Need(NamedTuple):
    """What a reservation takes: new blocks at the end, and a private copy of the shared block being written."""

    num_new: int
    copies_tail: bool


class CacheGroup(Protocol):
    """One kind of memory over one pool; a table belongs to one sequence."""

    @property
    def whole_prefix(self) -> bool:
        """True if a hit needs every block from the start, so a node without this group's block serves nobody below."""
        ...

    @property
    def miss_reason(self) -> str:
        """Why this group could not serve a hit that the tokens allowed, in words for an operator."""
        ...

    def match(self, path: Sequence[RadixNode], num_blocks: int) -> Hit:
        """The longest hit of at most `num_blocks` blocks along `path`, the nodes from the root's child on."""
        ...

    def reserve(self, table: SequenceTable, computed: int, end: int) -> Need:
        """What making [computed, end) writable needs. Takes nothing: the manager does, in all groups or in none."""
        ...

    def commit(self, table: SequenceTable, computed: int) -> None:
        """Positions below `computed` are written: release what no later query of this sequence can see."""
        ...

    def release(self, table: SequenceTable) -> None:
        """Drop all references of the table."""
        ...

    def check(self, table: SequenceTable, computed: int) -> None:
        """Assert that the table holds exactly what later queries of the sequence can see below `computed`."""
        ...


def kinds() -> tuple[str, ...]:
    """The names of all kinds: the files of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def build_group(index: int, layout: GroupLayout, block_size: int, pool: BlockPool) -> CacheGroup:
    """The group object of group `index`. Raises ConfigError for a kind without a file."""
    if layout.kind not in kinds():
        raise ConfigError(f"unknown cache group kind {layout.kind!r}; known: {', '.join(kinds())}")
    module = import_module(f"{__name__}.{layout.kind}")
    return cast("CacheGroup", module.build(index, layout, block_size, pool))


def append_need(table: SequenceTable, computed: int, end: int, block_size: int, pool: BlockPool) -> Need:
    """The Need of a kind that appends one slot per token: blocks up to `end`, and a copy of a shared partial block."""
    num_new = -(-end // block_size) - table.end_block
    copies_tail = computed % block_size != 0 and pool.ref_count(table.block_at(computed // block_size)) > 1
    return Need(max(num_new, 0), copies_tail)
