"""Count what the machine did to this process: stolen time, waits for a core, stalls, faults, heat, energy.

Read once a second by the engine's loop, from files that cost microseconds; whatever the machine does not tell is NaN.
"""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostSample(NamedTuple):
    """Counters since an unknown start, to be read as differences; those in bytes and hertz are of now."""

    steal_s: float  # of all cores, taken by the hypervisor
    run_delay_s: float  # this thread, ready and without a core
    cpu_stall_s: float  # some task of the machine waited for a core (PSI), for memory, for a disk
    memory_stall_s: float
    io_stall_s: float
    throttled_s: float  # by the quota of the cgroup
    major_faults: float  # pages of this process that had to be read from a disk
    rss_bytes: float
    swap_bytes: float  # of this process, that were swapped out
    frequency_hz: float  # of core 0
    thermal_events: float  # times that core 0 was throttled for its heat
    energy_j: float  # of the first package


def huge_page_bytes(process_id: int | None, root: Path = Path("/")) -> int | None:
    """Return the memory of a process, None: this one, in huge pages; None where the machine does not tell.

    The system walks all of the process's pages: up to 0.1 s a GB of small ones.
    """
    try:
        text = (root / f"proc/{process_id or 'self'}/smaps_rollup").read_text()
    except OSError:
        return None
    found = re.findall(r"^(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped): +(\d+) kB$", text, re.M)
    return 1024 * sum(map(int, found)) if found else None


def remote_share(process_id: int | None, root: Path = Path("/")) -> float | None:
    """Return how often a core reads memory of a process, None: this one, from another core's node; None: not told.

    That is so where its pages and its cores lie on the nodes as they do, and every core reads all of them.
    """
    process = root / f"proc/{process_id or 'self'}"
    nodes = sorted((root / "sys/devices/system/node").glob("node*/cpulist"))
    try:
        pages = re.findall(r" N(\d+)=(\d+)", (process / "numa_maps").read_text())
        allowed = re.findall(r"^Cpus_allowed_list:\s*(\S+)", (process / "status").read_text(), re.M)
        cores = {path.parent.name[4:]: _cpus(path.read_text()) & _cpus(allowed[0]) for path in nodes}
    except (OSError, IndexError):
        return None
    total = sum(int(count) for _, count in pages) * sum(map(len, cores.values()))
    return 1 - sum(int(count) * len(cores.get(node, ())) for node, count in pages) / total if total else None


def _cpus(text: str) -> set[int]:
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


class HostReader:
    """Reads samples of the thread that asks. Files that are missing at first are not looked for again."""

    def __init__(self, root: Path = Path("/")) -> None:
        cpu, pressure = root / "sys/devices/system/cpu/cpu0", root / "proc/pressure"
        quota = root / "sys/fs/cgroup/cpu.stat", r"(?s).*throttled_usec (\d+)", 1e-6
        if not quota[0].exists():  # cgroups of version 1
            quota = root / "sys/fs/cgroup/cpu/cpu.stat", r"(?s).*throttled_time (\d+)", 1e-9
        sources: dict[str, tuple[Path, str, float]] = {
            "steal_s": (root / "proc/stat", r"cpu +(?:\d+ +){7}(\d+)", TICK_S),
            "run_delay_s": (root / "proc/thread-self/schedstat", r"\d+ (\d+)", 1e-9),
            "cpu_stall_s": (pressure / "cpu", r"some .*total=(\d+)", 1e-6),
            "memory_stall_s": (pressure / "memory", r"some .*total=(\d+)", 1e-6),
            "io_stall_s": (pressure / "io", r"some .*total=(\d+)", 1e-6),
            "throttled_s": quota,
            "major_faults": (root / "proc/self/stat", r"\d+ \(.*\) \S+(?: -?\d+){8} (\d+)", 1),
            "rss_bytes": (root / "proc/self/statm", r"\d+ (\d+)", PAGE_BYTES),
            "swap_bytes": (root / "proc/self/status", r"(?s).*\nVmSwap:\s*(\d+) kB", 1024),
            "frequency_hz": (cpu / "cpufreq/scaling_cur_freq", r"(\d+)", 1e3),
            "thermal_events": (cpu / "thermal_throttle/core_throttle_count", r"(\d+)", 1),
            "energy_j": (root / "sys/class/powercap/intel-rapl:0/energy_uj", r"(\d+)", 1e-6),
        }
        self._sources: list[Callable[[], float]] = [_source(*sources[name]) for name in HostSample._fields]

    def read(self) -> HostSample:
        """Return the counters now."""
        return HostSample(*(read() for read in self._sources))


def _source(path: Path, pattern: str, unit: float) -> Callable[[], float]:
    """Return what reads the number that `pattern` finds at the start of a file, in multiples of `unit`."""
    found = re.compile(pattern.encode())

    def read() -> float:
        try:
            with path.open("rb", buffering=0) as file:
                match = found.match(file.read(4096))
        except OSError:
            return math.nan
        return int(match[1]) * unit if match else math.nan

    return read if not math.isnan(read()) else lambda: math.nan
