"""Measured peaks of the machine (memory bandwidth, FLOP/s), cached on disk. Measured by `backends/probe.py`.

A ceiling is the 90th percentile of repeated readings: what the machine does when it is left alone, without trusting
one lucky reading. Must not import torch.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ridgeline.core.errors import RidgelineError
from ridgeline.core.log import get_logger
from ridgeline.core.machine import cache_folder

log = get_logger("hardware")

PROBE_VERSION = 1  # raised when the probe measures something else: results of another version are not used
InputKind = Literal["f32", "bf16", "int16", "int8"]
INPUT_KINDS: tuple[InputKind, ...] = ("f32", "bf16", "int16", "int8")
CEILING_QUANTILE = 0.9
STEADY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that was measured: `num_cores` that the process may use, `isa_level` that the probe ran at.

    `isa_level` is None where there is no native module.
    """

    cpu_model: str
    num_cores: int
    memory_bytes: int
    isa_level: str | None

    @property
    def fingerprint(self) -> str:
        """Names the measurements that hold for this machine: sixteen hexadecimal digits."""
        identity = [self.cpu_model, self.num_cores, self.isa_level, PROBE_VERSION]
        return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes or operations per second: the ceiling, and the median of the readings, which is lower on a busy machine."""

    per_s: float
    median_per_s: float

    @classmethod
    def of(cls, readings_per_s: Sequence[float]) -> "Ceiling":
        high, middle = np.quantile(readings_per_s, (CEILING_QUANTILE, 0.5)).tolist()
        return cls(high, middle)


ByThreads = Mapping[int, Ceiling]  # number of threads -> what they reach together


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine and its ceilings. `ops_per_s` counts a multiply-add as two and is empty without the native module."""

    machine: Machine
    probe_version: int
    measured_at: str  # ISO 8601, UTC
    stream_buffer_bytes: int
    cache_bytes: int  # of the last-level cache; half of it is the buffer of the cached stream
    stream_bytes_per_s: ByThreads  # reading memory
    cached_bytes_per_s: ByThreads  # reading what the last-level cache holds
    ops_per_s: Mapping[InputKind, ByThreads]

    def stream(self, num_threads: int) -> float:
        """Return the bytes per second that `num_threads` threads read from memory."""
        return _at(self.stream_bytes_per_s, num_threads)

    def cached(self, num_threads: int) -> float:
        """Return the bytes per second that `num_threads` threads read from the last-level cache."""
        return _at(self.cached_bytes_per_s, num_threads)

    def peak(self, kind: InputKind, num_threads: int) -> float | None:
        """Return the operations per second on inputs of a kind; None where they could not be measured."""
        by_threads = self.ops_per_s.get(kind)
        return _at(by_threads, num_threads) if by_threads else None

    def ridge(self, kind: InputKind, num_threads: int) -> float | None:
        """Return the operations per byte of memory above which `num_threads` threads are limited by arithmetic."""
        peak = self.peak(kind, num_threads)
        return None if peak is None else peak / self.stream(num_threads)

    @property
    def was_busy(self) -> bool:
        """Whether the machine did something else while it was measured, so that its ceilings may be higher."""
        return self.steadiness < STEADY

    @property
    def steadiness(self) -> float:
        """The lowest median reading as a share of its ceiling."""
        measured = (self.stream_bytes_per_s, self.cached_bytes_per_s, *self.ops_per_s.values())
        return min(ceiling.median_per_s / ceiling.per_s for by_threads in measured for ceiling in by_threads.values())


def _at(by_threads: ByThreads, num_threads: int) -> float:
    """Interpolate between measured thread counts; beyond them take the nearest."""
    counts = sorted(by_threads)
    return float(np.interp(num_threads, counts, [by_threads[count].per_s for count in counts]))


def save(hardware: Hardware) -> Path:
    """Cache measurements for the next start, whole or not at all. Raises OSError and ConfigError."""
    path = cache_path(hardware.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(hardware)))
        Path(temporary).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    return path


def load(machine: Machine) -> Hardware | None:
    """Return what was measured on this machine before; None if nothing was, or what is there cannot be used."""
    try:
        path = cache_path(machine)
        found = msgspec.json.decode(path.read_bytes(), type=Hardware)
    except FileNotFoundError:
        return None
    except (OSError, RidgelineError, msgspec.DecodeError) as error:
        log.warning("cached measurements cannot be read, so they are made again: %s", error)
        return None
    fits = found.machine.fingerprint == machine.fingerprint and found.probe_version == PROBE_VERSION
    return found if fits and found.stream_bytes_per_s and found.cached_bytes_per_s else None


def cache_path(machine: Machine) -> Path:
    """Return where the measurements of a machine are cached. Raises ConfigError if there is no place."""
    return cache_folder() / "hardware" / f"{machine.fingerprint}.json"
