"""The state of the machine around a run: the memory bandwidth, the load, the time stolen by the hypervisor.

As a script (`python machine.py THREADS`) it prints the memory bandwidth in GB/s, from a process of its own.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

STREAM_BYTES = 2**30
STREAM_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Total, idle and stolen time of all cores since boot, in ticks."""

    total: int
    idle: int
    steal: int


def read_bandwidth_gb_per_s(threads: int) -> float:
    """What `threads` threads read from memory together, measured now in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cpu_times() -> CpuTimes:
    """Now. Zeros where there is no /proc."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return CpuTimes(0, 0, 0)
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]  # user to steal; guests are in user
    return CpuTimes(total=sum(ticks), idle=ticks[3] + ticks[4], steal=ticks[7])


def steal_share(before: CpuTimes, after: CpuTimes) -> float:
    """The part of the time between in which this machine wanted to run and was not let."""
    return (after.steal - before.steal) / max(after.total - before.total, 1)


def load_average() -> float:
    """Runnable tasks over the last minute."""
    return os.getloadavg()[0]


def _measure(threads: int) -> float:
    """The best of some passes over a buffer far larger than any cache. numpy's maximum is as fast as memory is."""
    import numpy as np

    parts = np.array_split(np.ones(STREAM_BYTES // 4, dtype=np.float32), threads)
    durations_s: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(STREAM_ROUNDS):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            durations_s.append(time.perf_counter() - started)
    return STREAM_BYTES / min(durations_s) / 1e9


if __name__ == "__main__":
    print(_measure(int(sys.argv[1])))
