"""Cache measured peaks of the machine (memory bandwidth, FLOP/s) on disk. Measured by `backends/probe.py`.

A ceiling is the 90th percentile of repeated readings: no single lucky one, and what the machine does if left alone.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from ridgeline.core.errors import RidgelineError
from ridgeline.core.files import write_whole
from ridgeline.core.log import get_logger
from ridgeline.core.machine import cache_folder
from ridgeline.cost.efficiency import VERSION as CALIBRATION_VERSION
from ridgeline.cost.efficiency import Calibration, InputKind

log = get_logger("hardware")

PROBE_VERSION = 5  # raised when the probe measures something else: results of another version are not used
INPUT_KINDS: tuple[InputKind, ...] = ("f32", "bf16", "int16", "int8", "int4")
CEILING_QUANTILE = 0.9
STEADY = 0.8
SIZES_PER_OCTAVE = 8  # of bytes that are told apart: few sizes, so that few results are stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that was measured: `num_cores` that the process may use, `isa_level` that the probe ran at.

    `isa_level` is None where there is no native module.
    """

    cpu_model: str
    num_cores: int
    memory_bytes: int
    isa_level: str | None
    microcode: str = ""

    @property
    def fingerprint(self) -> str:
        """Names the measurements that hold for this machine: sixteen hexadecimal digits."""
        identity = [self.cpu_model, self.microcode, self.num_cores, self.isa_level, PROBE_VERSION]
        return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Holds bytes or operations per second of repeated readings: the ceiling, and how far readings lie from it."""

    per_s: float
    median_per_s: float
    p10_per_s: float
    best_per_s: float

    @classmethod
    def of(cls, readings_per_s: Sequence[float]) -> "Ceiling":
        return cls(*np.quantile(readings_per_s, (CEILING_QUANTILE, 0.5, 0.1, 1.0)).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Holds quantiles of repeated readings of one thing."""

    p10: float
    median: float
    p90: float

    @classmethod
    def of(cls, readings: Sequence[float]) -> "Spread":
        p10, middle, p90 = np.quantile(readings, (0.1, 0.5, 0.9)).tolist()
        return cls(p10=p10, median=middle, p90=p90)


ByThreads = Mapping[int, Ceiling]  # number of threads -> what they reach together


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Holds a machine and its ceilings. `ops_per_s` counts a multiply-add as two; empty without the native module."""

    machine: Machine
    probe_version: int
    measured_at: str  # ISO 8601, UTC
    stream_buffer_bytes: int
    cache_bytes: int  # of the last-level cache, as the system says: a virtual machine may not have all of it
    cached_buffer_bytes: int  # of each thread's cached stream: half of its second-level cache
    stream_bytes_per_s: ByThreads  # reading memory
    cached_bytes_per_s: ByThreads  # reading what the second-level caches hold
    reread_bytes_per_s: Mapping[int, ByThreads]  # reading so many bytes again and again, more than those caches hold
    ops_per_s: Mapping[InputKind, ByThreads]
    scalar_per_cycle: Spread | None  # independent additions on one core; None without the native module

    def stream(self, num_threads: int) -> float:
        """Return the bytes per second that `num_threads` threads read from memory."""
        return _at(self.stream_bytes_per_s, num_threads)

    def cached(self, num_threads: int) -> float:
        """Return the bytes per second that `num_threads` threads read from their caches."""
        return _at(self.cached_bytes_per_s, num_threads)

    def reread(self, num_bytes: float, num_threads: int) -> float:
        """Return the bytes per second that `num_threads` threads read of `num_bytes` that they read again and again.

        Between the sizes that were measured, on a line over their logarithms; of twice the largest, it is memory's.
        """
        per_s = {num_threads * self.cached_buffer_bytes: self.cached(num_threads)}
        per_s |= {size: _at(by_threads, num_threads) for size, by_threads in self.reread_bytes_per_s.items()}
        per_s[2 * max(per_s)] = self.stream(num_threads)
        sizes = sorted(per_s)
        octave = math.ceil(SIZES_PER_OCTAVE * math.log2(max(num_bytes, 1.0))) / SIZES_PER_OCTAVE
        found = np.interp(octave, np.log2(sizes), [per_s[size] for size in sizes])
        return max(float(found), self.stream(num_threads))

    def peak(self, kind: InputKind, num_threads: int) -> float | None:
        """Return the operations per second on inputs of a kind; None where they could not be measured."""
        by_threads = self.ops_per_s.get(kind)
        return _at(by_threads, num_threads) if by_threads else None

    def ridge(self, kind: InputKind, num_threads: int) -> float | None:
        """Return the operations per byte of memory above which `num_threads` threads are limited by arithmetic."""
        peak = self.peak(kind, num_threads)
        return None if peak is None else peak / self.stream(num_threads)

    def measured_now(
        self, num_threads: int, stream_bytes_per_s: Sequence[float], ops_per_s: Mapping[InputKind, Sequence[float]]
    ) -> "Hardware":
        """Return ceilings of `num_threads` threads from readings of some other moment, beside the older ones."""
        stream = {num_threads: Ceiling.of(stream_bytes_per_s)}
        newer = {kind: {num_threads: Ceiling.of(ops)} for kind, ops in ops_per_s.items()}
        return replace(self, stream_bytes_per_s=stream, ops_per_s={**self.ops_per_s, **newer})

    def calibrated(self, calibration: Calibration | None) -> "Hardware":
        """Return the ceilings that a calibration has shares of."""
        if calibration is None or calibration.stream_bytes_per_s is None:
            return self
        ops: dict[InputKind, list[float]] = {kind: [per_s] for kind, per_s in calibration.ops_per_s.items()}
        return self.measured_now(calibration.num_threads, [calibration.stream_bytes_per_s], ops)

    @property
    def is_shared(self) -> bool:
        """Whether somebody else's work runs on the core at the same time: it retires now more, now less a cycle."""
        scalar = self.scalar_per_cycle
        return scalar is not None and scalar.p10 < STEADY * scalar.p90

    @property
    def was_busy(self) -> bool:
        """Whether the machine did something else while it was measured, so that its ceilings may be higher."""
        return self.steadiness < STEADY

    @property
    def steadiness(self) -> float:
        """The lowest median reading as a share of its ceiling."""
        measured = (
            *(self.stream_bytes_per_s, self.cached_bytes_per_s),
            *(*self.reread_bytes_per_s.values(), *self.ops_per_s.values()),
        )
        return min(ceiling.median_per_s / ceiling.per_s for by_threads in measured for ceiling in by_threads.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedChoice:
    """Says what was chosen among the variants of a kernel, in rounds of all of them.

    `score` is how many times as fast as the default the variant was, at the median; 1 where the default was cached.
    """

    choice: str
    variant: str
    default: str
    score: float
    rounds_won: int
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTuning:
    """The variants measured for a kind of matrices, computed by `num_threads` threads of one build of the kernels.

    `read_bytes_per_s` is what the threads read from memory in the same seconds.
    """

    kind: str
    num_threads: int
    kernels: str
    measured_at: str  # ISO 8601, UTC
    read_bytes_per_s: float
    choices: tuple[TunedChoice, ...]

    @property
    def variants(self) -> dict[str, str]:
        """The variant of each choice."""
        return {each.choice: each.variant for each in self.choices}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    """The file of a machine: whatever was measured first, the other joins it."""

    machine: Machine
    ceilings: Hardware | None
    tunings: tuple[KernelTuning, ...]
    calibrations: tuple[Calibration, ...]


def _at(by_threads: ByThreads, num_threads: int) -> float:
    """Interpolate between measured thread counts; beyond them take the nearest."""
    counts = sorted(by_threads)
    return float(np.interp(num_threads, counts, [by_threads[count].per_s for count in counts]))


def save(hardware: Hardware) -> Path:
    """Save ceilings for the next start, whole or not at all. Raises OSError and ConfigError."""
    return _write(replace(_read(hardware.machine), ceilings=hardware, calibrations=()))  # shares of other ceilings


def load(machine: Machine) -> Hardware | None:
    """Return the ceilings that were measured on this machine before; None if none were, or they cannot be used."""
    cached = _read(machine).ceilings
    if cached is None or cached.probe_version != PROBE_VERSION:
        return None
    return cached if cached.stream_bytes_per_s and cached.cached_bytes_per_s else None


def save_tunings(machine: Machine, tunings: Sequence[KernelTuning]) -> Path:
    """Save the choices of kernels, instead of those that were cached. Raises OSError and ConfigError."""
    return _write(replace(_read(machine), tunings=tuple(tunings)))


def cached_tunings(machine: Machine) -> Sequence[KernelTuning]:
    """Return the choices of kernels that were measured on this machine, by any build."""
    return _read(machine).tunings


def cache_path(machine: Machine) -> Path:
    """Return where the measurements of a machine are cached. Raises ConfigError if there is no place."""
    return cache_folder() / "hardware" / f"{machine.fingerprint}.json"


def save_calibration(machine: Machine, calibration: Calibration) -> Path:
    """Cache efficiencies and what is around ops, with those of others that were cached for as many threads.

    Raises OSError and ConfigError.
    """
    cached = _read(machine)
    same = load_calibration(machine, calibration.num_threads)
    merged = {**(same.rebased(calibration) if same else {}), **calibration.efficiencies}
    rests = {**(same.rests if same else {}), **calibration.rests}
    others = (each for each in cached.calibrations if each.num_threads != calibration.num_threads)
    return _write(replace(cached, calibrations=(*others, replace(calibration, efficiencies=merged, rests=rests))))


def load_calibration(machine: Machine, num_threads: int) -> Calibration | None:
    """Return the efficiencies of `num_threads` threads that were fitted on this machine; None if none can be used."""
    usable = (each for each in _read(machine).calibrations if each.version == CALIBRATION_VERSION)
    return next((each for each in usable if each.num_threads == num_threads), None)


def _read(machine: Machine) -> _Cached:
    """Return what is cached of this machine; nothing where the file is missing, broken or of another machine."""
    nothing = _Cached(machine=machine, ceilings=None, tunings=(), calibrations=())
    try:
        cached = msgspec.json.decode(cache_path(machine).read_bytes(), type=_Cached)
    except FileNotFoundError:
        return nothing
    except (OSError, RidgelineError, msgspec.DecodeError) as error:
        log.warning("cached measurements cannot be read, so they are made again: %s", error)
        return nothing
    return cached if cached.machine.fingerprint == machine.fingerprint else nothing


def _write(cached: _Cached) -> Path:
    path = cache_path(cached.machine)
    write_whole(path, msgspec.json.format(msgspec.json.encode(cached)))
    return path
