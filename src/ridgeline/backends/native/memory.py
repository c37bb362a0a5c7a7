"""Memory that native kernels read and write by address: anonymous, 64-byte aligned, huge pages where there are any."""

import contextlib
import math
import mmap
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.settings import KvKind
from ridgeline.cache.layout import CacheLayout
from ridgeline.program.op import LOGITS, KvState, LatentState, Program, RecurrentState

ALIGNMENT = 64
HUGE_PAGE_BYTES = 2 << 20
ARENA_BYTES = 64 << 20  # that an arena takes at once
SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
SIZE = re.compile(r"(Rss|AnonHugePages|ShmemPmdMapped|FilePmdMapped): +(\d+) kB")
PANEL = 32  # outputs of a matrix product are whole panels


def allocate(num_bytes: int) -> np.ndarray:
    """Return uint8 [num_bytes], zero, in huge pages where the kernel gives them. Freed with the last view of it.

    Takes physical memory only where it is written. Raises MemoryError.
    """
    try:
        mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError(f"the system gives no {num_bytes:,} bytes") from None
    ask_for_huge_pages(mapping)
    return np.frombuffer(mapping, dtype=np.uint8, count=num_bytes)


class Arena:
    """Memory that is never given back, for parts of any size: a huge page holds one's end and the next's beginning."""

    def __init__(self) -> None:
        self._free = np.empty(0, dtype=np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """Return uint8 [num_bytes], zero and 64-byte aligned."""
        if num_bytes > self._free.nbytes:
            self._free = allocate(-(-max(num_bytes, ARENA_BYTES) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        taken, self._free = self._free[:num_bytes], self._free[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return taken


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for huge pages for a mapping that is large enough; of a file, where its file system has them."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    if advice is not None and len(mapping) >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(advice)


def address(array: np.ndarray) -> int:
    """Return the address of the array's first byte. The caller keeps the array."""
    return array.ctypes.data


def huge_page_share(parts: Iterable[np.ndarray], smaps: Path = SMAPS) -> float | None:
    """Return the share in huge pages of the mappings that hold `parts`; None where the system does not tell."""
    starts = sorted(address(part) for part in parts)
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return None
    total = huge = 0
    holds = False
    for line in lines:
        if mapping := MAPPING.match(line):
            begin, end = (int(bound, 16) for bound in mapping.groups())
            at = bisect_left(starts, begin)
            holds = at < len(starts) and starts[at] < end
        elif holds and (size := SIZE.match(line)):
            kind, num_bytes = size[1], int(size[2]) << 10
            total += num_bytes if kind == "Rss" else 0
            huge += 0 if kind == "Rss" else num_bytes
    return huge / total if total else None


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The cache's memory by state, each with its cache group; `blocks` keep that of keys, values and latents."""

    kv: Mapping[int, tuple[_native.KvMemory, int]]
    recurrent: Mapping[int, tuple[Sequence[np.ndarray], int]]  # the parts of a state, float32 [blocks, ...] each
    logs: Mapping[int, Sequence[np.ndarray]]  # of a state's parts, float32 [blocks, rows, width] each, if there are any
    blocks: Sequence[np.ndarray]


def allocate_cache(program: Program, layout: CacheLayout, kind: KvKind) -> CacheMemory:
    """Allocate the blocks of every state of the program."""
    kv: dict[int, tuple[_native.KvMemory, int]] = {}
    recurrent: dict[int, tuple[Sequence[np.ndarray], int]] = {}
    logs: dict[int, Sequence[np.ndarray]] = {}
    blocks: list[np.ndarray] = []
    for index, group in enumerate(layout.groups):
        for number in group.states:
            state = program.states[number]
            if isinstance(state, RecurrentState):
                recurrent[number] = [_floats(group.num_blocks, *shape) for shape in state.parts], index
                widths = state.logged if group.log_rows else ()
                logs[number] = [_floats(group.num_blocks, group.log_rows, width) for width in widths]
            else:
                num_bytes = group.num_blocks * kv_memory(kind, state, layout.block_size, 0).block_bytes
                blocks.append(allocate(num_bytes))
                kv[number] = kv_memory(kind, state, layout.block_size, address(blocks[-1])), index
    return CacheMemory(kv, recurrent, logs, blocks)


def _floats(*shape: int) -> np.ndarray:
    return allocate(4 * math.prod(shape)).view(np.float32).reshape(shape)


def kv_memory(kind: KvKind, state: KvState | LatentState, block_size: int, location: int) -> _native.KvMemory:
    """Return the blocks of a state at an address."""
    if isinstance(state, LatentState):
        entries = state.latent_dim + state.rope_dim
        return _native.KvMemory(kind, 1, entries, block_size, location, latent_dim=state.latent_dim)
    return _native.KvMemory(kind, state.num_heads, state.head_dim, block_size, location)


def logits_width(program: Program) -> int:
    """Return the floats of a row of a step's logits: a panel, unused, where the program has no head."""
    widths = (program.vocab_size, program.vocab_size // 16 + 1)  # as `room_for_maxima` of native/kernels/sample has it
    return sum(-(-width // PANEL) * PANEL for width in widths) if program.result == LOGITS else PANEL


def checksums(parts: Sequence[memoryview], num_threads: int) -> list[int]:
    """Compute a 64-bit checksum of each part, at the speed of memory and without Python's lock."""
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts]
    return _native.checksums([(address(array), array.size) for array in arrays], num_threads)
