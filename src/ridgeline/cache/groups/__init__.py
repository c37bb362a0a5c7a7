"""The kinds of memory a cache group can be: one file per kind, file name == kind, whose `build` is its class."""

import pkgutil
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import ClassVar, NamedTuple, cast

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
    """A reservation takes new blocks at the end, and a private copy of the shared block being written."""

    num_new: int
    copy_at: int | None = None  # block index of the block to copy


NO_NEED = Need(0)


class CacheGroup:
    """Manages one kind of memory over one pool; a table belongs to one sequence.

    A kind that leaves a method out keeps all blocks to the end, cuts no span, and shares no block with the tree.
    """

    whole_prefix: ClassVar[bool]  # a hit needs every block from the start: a node without this group's serves nobody
    miss_reason: ClassVar[str]  # why this group could not serve a hit that the tokens allowed, for an operator
    can_roll_back: bool  # of what a step has computed less may be committed: it is computed again later
    can_branch: ClassVar[bool] = True  # whoever has copies of the last blocks can go on from them another way
    in_place: ClassVar[bool] = False  # a step overwrites what it goes on from: that is committed before it is planned

    def __init__(self, index: int, layout: GroupLayout, block_size: int, pool: BlockPool) -> None:
        self._index, self._layout, self._block_size, self._pool = index, layout, block_size, pool

    def match(self, path: Sequence[RadixNode], num_blocks: int) -> Hit:
        """Return the longest hit of at most `num_blocks` blocks along `path`, the nodes from the root's child on."""
        raise NotImplementedError

    def reserve(self, table: SequenceTable, computed: int, end: int) -> Need:
        """Return what making [computed, end) writable needs. Takes nothing: the manager does, in all groups or none."""
        raise NotImplementedError

    def changing_offsets(self) -> Iterable[int]:
        """Return where in a block the computed tokens of an output end when a commit changes more than their number."""
        return range(self._block_size)

    def span_end(self, computed: int, end: int, *, drafts: bool) -> int:
        """Return where in (computed, end] a span from `computed` on should end, so that later prompts can reuse it.

        `drafts`: its last tokens are drafts, which may be left out.
        """
        return end

    def published_block(self, table: SequenceTable, index: int, before: int, computed: int) -> int | None:
        """Return the block to publish for block index `index`, once positions `before .. computed` are written."""
        raise NotImplementedError

    def log(self, table: SequenceTable, num_logged: int) -> None:
        """Note how many of the computed tokens, the last ones, are only logged: their span was one with drafts."""

    def commit(self, table: SequenceTable, computed: int) -> None:
        """Release what no later query of this sequence can see, now that positions below `computed` are written."""

    def truncate(self, table: SequenceTable, end: int) -> None:
        """Release what was reserved from position `end` on."""

    def tree_block(self, table: SequenceTable, index: int) -> int | None:
        """Return the block that a published node of index `index` must share with the table; None: it need not."""
        return None


def kinds() -> tuple[str, ...]:
    """Return the names of all kinds: the files of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def build_group(index: int, layout: GroupLayout, block_size: int, pool: BlockPool) -> CacheGroup:
    """Build the group object of group `index`. Raises ConfigError for a kind without a file."""
    if layout.kind not in kinds():
        raise ConfigError(f"unknown cache group kind {layout.kind!r}; known: {', '.join(kinds())}")
    module = import_module(f"{__name__}.{layout.kind}")
    return cast("CacheGroup", module.build(index, layout, block_size, pool))
