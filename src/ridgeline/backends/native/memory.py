"""Memory that native kernels read and write by address: anonymous, 64-byte aligned, huge pages where there are any."""

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np

from ridgeline import _native

ALIGNMENT = 64


def allocate(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes], zero, in huge pages where the kernel gives them. Freed with the last view of it.

    Takes physical memory only where it is written.
    """
    mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    if advice is not None and num_bytes >= 2**21:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(advice)
    return np.frombuffer(mapping, dtype=np.uint8, count=num_bytes)


def address(array: np.ndarray) -> int:
    """Where the array's first byte is. The caller keeps the array."""
    return array.ctypes.data


def checksum(data: memoryview) -> int:
    """A 64-bit checksum at the speed of memory."""
    array = np.frombuffer(data, dtype=np.uint8)
    return _native.checksum(address(array), array.size)


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned offsets of consecutive pieces of the given sizes in bytes, and the total."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end
