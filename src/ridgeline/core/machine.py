"""Describe what this process runs on: processor, usable cores, memory, and the folder in which results are cached."""

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from ridgeline.core.errors import ConfigError

_CPUINFO = Path("/proc/cpuinfo")
_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cpu_model() -> str:
    """Return the processor's name; its architecture where the system does not tell."""
    return cpuinfo("model name") or platform.machine()


def microcode() -> str:
    """Return the revision of the processor's microcode; empty where the system does not tell."""
    return cpuinfo("microcode")


def cpuinfo(name: str) -> str:
    """Return what the system says of the first processor under a name; empty where it does not."""
    try:
        match = re.search(rf"^{name}\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else ""


def usable_cores() -> int:
    """Count the logical cores that this process may keep busy: its affinity, and whole cores of its cgroup's quota."""
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in _cpu_quotas())]))


def memory_bytes() -> int:
    """Return the size of physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_level_cache_bytes() -> int | None:
    """Return the size of the largest cache that core 0 reads through; None where the system does not tell."""
    return max(_cache_bytes().values(), default=None)


def level_2_cache_bytes() -> int | None:
    """Return the size of core 0's second-level cache; None where the system does not tell."""
    return _cache_bytes().get(2)


def _cache_bytes() -> dict[int, int]:
    """Return the size of the largest cache of each level that core 0 reads through."""
    sizes: dict[int, int] = {}
    for path in _CACHES.glob("index*/size"):
        size, level = path.read_text().strip(), int((path.parent / "level").read_text())
        if size:
            sizes[level] = max(sizes.get(level, 0), int(size[:-1]) * 1024)
    return sizes


def cache_folder() -> Path:
    """Return the folder of cached results: `ridgeline` below XDG_CACHE_HOME, else below ~/.cache.

    The folder need not exist. Raises ConfigError where there is no home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():  # the XDG specification has others ignored
        return Path(given) / "ridgeline"
    try:
        return Path.home() / ".cache" / "ridgeline"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder to cache results in: set XDG_CACHE_HOME to a folder") from error


def _cpu_quotas() -> Iterator[float]:
    """Yield the cores' worth of time that each enclosing cgroup (version 2 or 1) allows; nothing without a limit."""
    for folder in cgroup_folders("cpu"):
        limit = numbers(folder / "cpu.max")
        if not limit:
            limit = [*numbers(folder / "cpu.cfs_quota_us"), *numbers(folder / "cpu.cfs_period_us")]
        if len(limit) == 2 and 0 < limit[0] < math.inf and limit[1] > 0:
            yield limit[0] / limit[1]


def cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folder of each cgroup with these limits that holds this process, up to the root that it can see."""
    try:
        lines = _PROC_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers
        inner = Path(path.lstrip("/"))
        yield from (root / folder for folder in (inner, *inner.parents))


def numbers(path: Path) -> list[float]:
    """Return the numbers in a file, "max" being infinity; nothing if there is no such file."""
    try:
        return [math.inf if word == "max" else float(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
