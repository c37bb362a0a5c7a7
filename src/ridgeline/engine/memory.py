"""The memory of this process: how much it may still take, and that it keeps what the next step needs again."""

import ctypes
import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

# glibc's parameters for mallopt, and the largest threshold that it accepts
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_HEAP_BYTES = 32 << 20
_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> None:
    """Lets malloc keep up to 512 MiB of what is freed; does nothing where the C library is not glibc.

    By default glibc gives every large temporary tensor back to the kernel and takes it anew, page by page, on the next
    step: a tenth to a quarter of a prompt's time, by the luck of what the process allocated before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MOST_HEAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def available_bytes() -> int:
    """Bytes that can be allocated without swapping; the physical memory where the system does not tell."""
    limits = [limit for limit in (_machine_bytes(), _cgroup_bytes()) if limit is not None]
    return min(limits) if limits else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024


def _cgroup_bytes() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
