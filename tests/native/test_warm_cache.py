"""The cache's memory is there before a step writes it."""

import os
import time
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


def done(warmer: _native.MemoryWarmer) -> None:
    """Wait for a warmer."""
    deadline = time.monotonic() + 60
    while warmer.busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def policy(thread: int) -> int:
    """Return a thread's scheduling policy; -1 where it has ended."""
    try:
        return os.sched_getscheduler(thread)
    except ProcessLookupError:
        return -1


def test_memory_is_resident_and_keeps_what_it_holds() -> None:
    array, warmer = allocate(8 << 20), _native.MemoryWarmer()
    array[5 << 20] = 7
    before = resident_bytes(array)
    if not warmer.take([(address(array), array.nbytes)]):
        pytest.skip("this system does not give memory when asked to")
    done(warmer)
    assert resident_bytes(array) - before >= 5 << 20  # all but the page that was written, which may be a huge one
    assert array[5 << 20] == 7 and array.sum() == 7


def test_memory_is_taken_where_nobody_else_computes() -> None:
    """A thread that is only nice goes on for milliseconds where a worker of a step wakes."""
    array, warmer = allocate(64 << 20), _native.MemoryWarmer()
    if not warmer.take([(address(array), array.nbytes)]):
        pytest.skip("this system does not give memory when asked to")
    policies: set[int] = set()
    while warmer.busy and os.SCHED_IDLE not in policies:
        policies |= set(map(policy, map(int, os.listdir("/proc/self/task"))))
    assert os.SCHED_IDLE in policies and os.sched_getscheduler(0) != os.SCHED_IDLE
    done(warmer)


def test_a_warmer_outlives_its_memory_and_is_outlived() -> None:
    for _ in range(20):
        array, warmer = allocate(4 << 20), _native.MemoryWarmer()
        warmer.take([(address(array), array.nbytes)] * 20)
        del warmer, array


def test_the_cache_stays_ahead_of_what_is_used() -> None:
    block_size, num_blocks, block_bytes = 16, 1024, 64 << 10
    blocks = allocate(num_blocks * block_bytes)
    kv = _native.KvMemory("bf16", 8, 128, block_size, address(blocks))
    layout = CacheLayout(block_size, (GroupLayout("full", (0,), None, block_bytes // block_size, num_blocks),))
    warmer = CacheWarmer(CacheMemory({0: (kv, 0)}, {}, {}, [blocks]), layout)
    if not _native.MemoryWarmer().take([]):
        pytest.skip("this system does not give memory when asked to")
    before, taken = resident_bytes(blocks), []
    for slot in (0, 10, AHEAD_TOKENS, num_blocks * block_size - 1):
        warmer.stay_ahead(slot)
        done(warmer.native)
        taken.append(resident_bytes(blocks) - before)
    ahead = AHEAD_TOKENS // block_size * block_bytes
    for is_taken, asked in zip(taken, (ahead, ahead, 2 * ahead, blocks.nbytes)):
        assert abs(is_taken - asked) <= 4 << 20  # pages that are huge reach past the end
    assert taken[0] == taken[1] < taken[2] < taken[3]
