"""Measures this machine's ceilings with the native probe kernels, or what numpy can tell where they are absent.

Must import neither torch nor the native backend, which may not be there.
"""

import importlib
import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import ModuleType

import numpy as np

from ridgeline.core.errors import ConfigError
from ridgeline.core.log import get_logger
from ridgeline.core.machine import (
    cpu_model,
    last_level_cache_bytes,
    level_2_cache_bytes,
    memory_bytes,
    microcode,
    usable_cores,
)
from ridgeline.cost import hardware
from ridgeline.cost.hardware import INPUT_KINDS, PROBE_VERSION, ByThreads, Ceiling, Hardware, InputKind, Machine, Spread

log = get_logger("hardware")

ROUNDS, REPEATS = 4, 5
PEAK_S = 0.01
MIN_STREAM_BYTES, MAX_STREAM_BYTES = 256 << 20, 2 << 30
DEFAULT_CACHE_BYTES, DEFAULT_LEVEL_2_BYTES = 16 << 20, 1 << 20
CACHE_SHARES = (8, 4, 2, 1)  # parts of the last-level cache that are read again and again
SCALAR_WINDOWS = 200
MIN_MOMENT_BYTES, MAX_MOMENT_BYTES, MOMENT_S = 128 << 20, 512 << 20, 0.002
Probe = Callable[[], Sequence[float]]
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, slots=True)
class NativeModule:
    """The extension module, or None and the reason why it is not there."""

    module: ModuleType | None
    reason: str = ""

    @property
    def levels(self) -> tuple[str, ...]:
        """ISA levels that this machine runs, narrowest first; the emulation is for tests and left out."""
        levels: list[str] = self.module.runnable_levels() if self.module else []
        return tuple(level for level in levels if level != "amx_emulated")


def find_native() -> NativeModule:
    """Return the native module as it is installed here."""
    try:
        return NativeModule(importlib.import_module("ridgeline._native"))
    except ModuleNotFoundError:
        compiler = next(filter(shutil.which, COMPILERS), None)
        if compiler is None:
            return NativeModule(None, "it was not built: there is no C++ compiler; install one, then Ridgeline again")
        return NativeModule(None, f"it was not built; there is a compiler ({compiler}), so install Ridgeline again")
    except ImportError as error:
        return NativeModule(None, f"it cannot be loaded: {error}")


def this_machine(native: NativeModule, level: str | None = None) -> Machine:
    """Describe the machine as `measure` does, at an ISA level that runs here; None: the widest."""
    return Machine(
        cpu_model=cpu_model(),
        microcode=microcode(),
        num_cores=usable_cores(),
        memory_bytes=memory_bytes(),
        isa_level=level or native.module.best_level() if native.module else None,
    )


def ceilings(native: NativeModule, level: str | None = None, *, again: bool = False) -> Hardware:
    """Return what was measured on this machine before, at ISA level `level`; None: the widest. Measure if nothing was.

    `again`: measure in any case, and forget which kernels were chosen, too.
    """
    machine = this_machine(native, level)
    cached = None if again else hardware.load(machine)
    if cached is not None:
        return cached
    measured = measure(native, machine)
    try:
        hardware.save(measured)
        if again:
            hardware.save_tunings(machine, [])
    except (OSError, ConfigError) as error:
        log.warning("the measurements could not be cached, so the next start makes them again: %s", error)
    return measured


def measure(native: NativeModule, machine: Machine | None = None) -> Hardware:
    """Read memory and run register-only loops for a few seconds, on 1, 2, 4, ... and all usable cores.

    Every probe runs once in each of a few rounds: what else the machine does for a moment spoils few readings of each.
    """
    machine, module = machine or this_machine(native), native.module
    cache_bytes = last_level_cache_bytes() or DEFAULT_CACHE_BYTES
    cached_bytes = (level_2_cache_bytes() or DEFAULT_LEVEL_2_BYTES) // 2
    wanted = min(max(4 * cache_bytes, MIN_STREAM_BYTES), MAX_STREAM_BYTES)
    stream_bytes = min(wanted, machine.memory_bytes // 8)
    counts = thread_counts(machine.num_cores)
    ends = sorted({counts[0], counts[-1]})  # arithmetic scales with the cores: two points say it
    read = numpy_stream if module is None else partial(module.read_bandwidth, machine.isa_level)
    sizes = [size for share in CACHE_SHARES if (size := cache_bytes // share) >= 4 * machine.num_cores * cached_bytes]
    probes: dict[tuple[str | int, int], Probe] = {}
    for count in counts:
        probes["stream", count] = partial(read, count, stream_bytes, REPEATS)
        probes["cached", count] = partial(read, count, count * cached_bytes, REPEATS)
    for size, count in itertools.product(sizes, ends):
        probes[size, count] = partial(read, count, size, REPEATS)
    if module is not None:
        for kind, count in itertools.product(INPUT_KINDS, ends):
            probes[kind, count] = partial(module.peak, machine.isa_level, kind, count, PEAK_S, REPEATS)

    readings: dict[tuple[str | int, int], list[float]] = {key: [] for key in probes}
    scalar: list[float] = []
    for _ in range(ROUNDS):
        for key, probe in probes.items():
            readings[key] += probe()
        if module is not None:
            scalar += module.scalar_per_cycle(SCALAR_WINDOWS)

    def found(what: str | int) -> ByThreads:
        return {count: Ceiling.of(per_s) for (probed, count), per_s in readings.items() if probed == what}

    return Hardware(
        machine=machine,
        probe_version=PROBE_VERSION,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        stream_buffer_bytes=stream_bytes,
        cache_bytes=cache_bytes,
        cached_buffer_bytes=cached_bytes,
        stream_bytes_per_s=found("stream"),
        cached_bytes_per_s=found("cached"),
        reread_bytes_per_s={size: found(size) for size in sizes},
        ops_per_s={kind: found(kind) for kind in INPUT_KINDS} if module else {},
        scalar_per_cycle=Spread.of(scalar) if module else None,
    )


class Moment:
    """Measures the ceilings of a moment: a read of memory and a loop of products, some milliseconds each.

    Beside them a step of the same second says what share of the machine it reached, whoever else uses it.
    """

    def __init__(self, native: NativeModule, level: str, num_threads: int) -> None:
        assert native.module is not None
        self._module, self._level, self._num_threads = native.module, level, num_threads
        self._pool = native.module.Pool(num_threads)
        wanted = max(MIN_MOMENT_BYTES, 2 * (last_level_cache_bytes() or DEFAULT_CACHE_BYTES))
        self._memory = np.ones(min(wanted, MAX_MOMENT_BYTES, memory_bytes() // 16) // 64 * 8, dtype=np.int64)

    def read(self) -> tuple[float, dict[InputKind, float]]:
        """Return one reading of memory in bytes per second, and one of each kind of products in operations."""
        started = time.perf_counter()
        self._module.read_all(self._level, self._pool, self._memory.ctypes.data, self._memory.nbytes)
        bytes_per_s = self._memory.nbytes / (time.perf_counter() - started)
        peak = partial(self._module.peak, self._level)
        ops: dict[InputKind, float] = {kind: peak(kind, self._num_threads, MOMENT_S, 1)[0] for kind in INPUT_KINDS}
        return bytes_per_s, ops


def thread_counts(num_cores: int) -> list[int]:
    """Return 1, 2, 4, ... below `num_cores`, and `num_cores`."""
    powers = [1 << bit for bit in range(num_cores.bit_length())]
    return [*(count for count in powers if count < num_cores), num_cores]


def numpy_stream(num_threads: int, buffer_bytes: int, repeats: int) -> list[float]:
    """Measure bytes per second of each of `repeats` reads of a buffer by numpy's maximum, which releases the GIL."""
    parts = np.array_split(np.ones(buffer_bytes // 8, dtype=np.int64), num_threads)
    readings: list[float] = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(repeats + 1):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            readings.append(buffer_bytes // 8 * 8 / (time.perf_counter() - started))
    return readings[1:]  # the first one warmed up
