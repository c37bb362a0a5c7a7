"""The cache's memory is there before a step writes it."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from ridgeline import _native
from ridgeline.backends.native.memory import CacheMemory, address, allocate
from ridgeline.backends.native.warm_cache import AHEAD_TOKENS, CacheWarmer
from ridgeline.cache.layout import CacheLayout, GroupLayout


def resident_bytes(array: np.ndarray) -> int:
    """Return how much of the mapping that holds `array` is in memory, as the system says."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            holds = begin <= address(array) < end
        elif holds and first == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError("no mapping holds the array")


def populates() -> bool:
    array = allocate(mmap.PAGESIZE)
    return _native.populate(address(array), array.nbytes)


needs_system = pytest.mark.skipif(not populates(), reason="this system does not give memory when asked to")


@needs_system
def test_populated_memory_is_resident_and_keeps_what_it_holds() -> None:
    array = allocate(8 << 20)
    array[5 << 20] = 7
    assert resident_bytes(array) < array.nbytes
    assert _native.populate(address(array), array.nbytes)
    assert resident_bytes(array) >= array.nbytes
    assert array[5 << 20] == 7 and array.sum() == 7


@needs_system
def test_the_cache_stays_ahead_of_what_is_used() -> None:
    block_size, num_blocks, block_bytes = 16, 1024, 64 << 10
    blocks = allocate(num_blocks * block_bytes)
    kv = _native.KvMemory("bf16", 8, 128, block_size, address(blocks))
    layout = CacheLayout(block_size, (GroupLayout("full", (0,), None, block_bytes // block_size, num_blocks),))
    warmer = CacheWarmer(CacheMemory({0: (kv, 0)}, {}, [blocks]), layout)
    resident = [resident_bytes(blocks)]
    for slot in (0, 10, AHEAD_TOKENS, num_blocks * block_size - 1):
        warmer.stay_ahead([slot])
        warmer.join()
        resident.append(resident_bytes(blocks))
    ahead = AHEAD_TOKENS // block_size * block_bytes
    assert resident == [0, ahead, ahead, 2 * ahead, blocks.nbytes]
