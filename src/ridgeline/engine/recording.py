"""Recordings: a journal from its first step on, in memory or in a file, with what it takes to run the steps again.

A file is a header and then frames, each with new records of one ring; it grows while the engine runs. There is no token
and no text in it, only keyed hashes of whole blocks.
"""

import atexit
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from ridgeline.cache.layout import CacheLayout
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.host import huge_page_bytes, remote_share
from ridgeline.core.log import get_logger
from ridgeline.cost.efficiency import Behind
from ridgeline.engine.journal import (
    AROUND_FIELDS,
    FIELDS,
    FINISH_REASONS,
    Journal,
    Recorder,
    Records,
    spans_of,
    timed_steps,
)
from ridgeline.engine.request import FinishReason
from ridgeline.program.pricing import Load

MAGIC = b"ridgeline journal 1\n"
LENGTH = struct.Struct("<Q")
BETWEEN_STEPS = [FINISH_REASONS.index(reason) for reason in (FinishReason.ABORT, FinishReason.DEADLINE)]

log = get_logger("journal")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Says how the engine was set up whose journal this is; `choices` are those it made itself, `value (reason)`."""

    config: EngineConfig
    layout: CacheLayout
    max_model_len: int
    max_num_rows: int
    strategy: str  # autoregressive where one token at a time was decoded, unless a request brought a prediction
    choices: Mapping[str, str]
    depth: int = 1  # of its executor; a deeper one chains plans
    num_cores: int | None = None  # that it might keep busy; None: it was not told


class _Frame(msgspec.Struct, array_like=True):
    ring: str
    fields: list[tuple[str, str]]
    records: bytes
    cache_reasons: list[str]


@dataclass(frozen=True, slots=True)
class Recording:
    """All records of a run since its first step; `setup` is None where it is not known."""

    setup: EngineSetup | None
    steps: Records
    spans: Records
    decisions: Records
    outputs: Records
    prompts: Records
    host: Records
    around: Records
    cache_reasons: tuple[str, ...]

    @property
    def began_s(self) -> float:
        """When the first request came, or the first step began, of a server's clock."""
        return min(float(self.steps["start_s"].min()), float(self.outputs["arrival_s"].min(initial=np.inf)))

    def spans_of(self, step: np.void) -> Records:
        """Return the spans of a step record, as they were in that step."""
        return spans_of(step, self.spans)

    def timed(self, most: int | None = None) -> Iterator[tuple[Load, Behind, float]]:
        """Yield what each step computed, what it follows, and its seconds; of `most` steps at most, far apart."""
        spans = self.spans[int(self.steps["first_span"][0]) if len(self.steps) else 0 :]
        told = timed_steps(self.steps, spans, 1 if self.setup is None else self.setup.depth)
        return islice(told, 0, None, 1 if most is None else -(-len(self.steps) // most))

    def hashes_of(self, output: np.void, kind: str = "hash") -> list[int]:
        """Return the hashes of an output's whole blocks; `own`: each without what is before it."""
        first = int(output["first_hash"])
        return self.prompts[kind][first : first + int(output["num_hashes"])].tolist()


class MemoryRecorder(Recorder):
    """Keeps everything that a journal had."""

    def __init__(self, setup: EngineSetup | None = None) -> None:
        super().__init__()
        self._setup = setup
        self._taken: dict[str, list[Records]] = {name: [] for name in FIELDS}

    def _take(self, name: str, records: Records, journal: Journal) -> None:
        self._taken[name].append(records)

    def close(self) -> None:
        """Do nothing: `recording` takes in what is left."""

    def recording(self, journal: Journal) -> Recording:
        """Return all records so far."""
        self.flush(journal)
        taken = self._taken.items()
        rings = {name: np.concatenate(each) if each else journal.rings[name].read()[1] for name, each in taken}
        return Recording(self._setup, **rings, cache_reasons=tuple(journal.cache_reasons))


class FileRecorder(Recorder):
    """Writes a journal to a file while the engine runs, and its end when the process exits. Raises ConfigError."""

    def __init__(self, path: Path, setup: EngineSetup) -> None:
        super().__init__()
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise ConfigError(f"the journal {path} cannot be written: {error.strerror}") from None
        self._file.write(MAGIC)
        self._frame(msgspec.msgpack.encode(setup))
        self._journal: Journal | None = None
        atexit.register(self.close)

    def __call__(self, journal: Journal) -> None:
        """Write what is new: much of it at once, or what there is when the machine is sampled, once a second."""
        self._journal = journal
        if journal.host.num_written > self._next["host"]:
            self.flush(journal)
        else:
            super().__call__(journal)

    def flush(self, journal: Journal) -> None:
        """Hand all that is new to the system, so that it outlives this process, whatever ends it.

        A disk that takes no more ends the journal, and not the engine.
        """
        if self._file.closed:
            return
        try:
            super().flush(journal)
            self._file.flush()
        except OSError as error:
            log.warning("the journal %s ends here, the engine goes on without: %s", self._file.name, error.strerror)
            with suppress(OSError):
                self._file.close()

    def close(self) -> None:
        """Write what is left, and close the file."""
        atexit.unregister(self.close)
        if not self._file.closed:
            if self._journal is not None:
                self.flush(self._journal)
            with suppress(OSError):
                if self._journal is not None:
                    self._take_memory(self._journal, None)
                self._file.close()

    def write_recent(self, journal: Journal, process_id: int | None = None) -> None:
        """Write what the rings still have of an engine in a process, None: this one, and close the file: steps with all
        their spans, outputs within them.
        """
        rings = {name: ring.read() for name, ring in journal.rings.items()}  # what others point into is read later
        retained = {name: records for name, (_, records) in rings.items()}
        first_span, first_hash = rings["spans"][0], rings["prompts"][0]
        steps = retained["steps"] = retained["steps"][retained["steps"]["first_span"] >= first_span]
        begin = rings["steps"][0] + len(rings["steps"][1]) - len(steps)
        outputs, decisions = retained["outputs"], retained["decisions"]
        ended = outputs["last_step"] - np.isin(outputs["reason"], BETWEEN_STEPS)  # in what step, or behind which
        is_whole = (outputs["first_step"] >= begin) & (ended < begin + len(steps))
        outputs = retained["outputs"] = outputs[is_whole & (outputs["first_hash"] >= first_hash)]
        retained["decisions"] = decisions[decisions["step"] >= steps["step"].min(initial=1 << 62)]
        steps["first_span"] -= first_span
        outputs["first_hash"] -= first_hash
        outputs["first_step"] -= begin
        outputs["last_step"] -= begin
        for name, records in retained.items():
            self._take(name, records, journal)
        self._take_memory(journal, process_id)
        self.close()

    def _take_memory(self, journal: Journal, process_id: int | None) -> None:
        """Write where the memory of a process lies: it takes too long to look while the engine runs."""
        record = np.full(1, np.nan, list(AROUND_FIELDS))
        for name, find in (("huge_page_bytes", huge_page_bytes), ("remote_share", remote_share)):
            if (value := find(process_id)) is not None:
                record[name] = value
        self._take("around", record, journal)

    def _take(self, name: str, records: Records, journal: Journal) -> None:
        fields = [(field, str(records.dtype[field])) for field in records.dtype.names or ()]
        self._frame(msgspec.msgpack.encode(_Frame(name, fields, records.tobytes(), journal.cache_reasons)))

    def _frame(self, data: bytes) -> None:
        self._file.write(LENGTH.pack(len(data)) + data)


def recorder(setup: EngineSetup) -> FileRecorder | None:
    """Return what writes the journal, where that was asked for. Raises ConfigError where it cannot be written."""
    return None if setup.config.journal is None else FileRecorder(Path(setup.config.journal), setup)


def read_recording(path: Path) -> Recording:
    """Read a journal's file, as far as it was written. Raises ConfigError for one that is missing, or no journal."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be read: {error.strerror}") from None
    if not data.startswith(MAGIC):
        raise ConfigError(f"{path} is no journal; `--journal FILE` of a command that runs a model writes one")
    frames: list[bytes] = []
    at = len(MAGIC)
    while at < len(data):
        begin = at + LENGTH.size
        end = begin + (LENGTH.unpack_from(data, at)[0] if begin <= len(data) else 1)
        if end > len(data):
            break
        frames.append(data[begin:end])
        at = end
    if not frames:
        raise ConfigError(f"the journal {path} was cut off within its first record")
    if at < len(data):
        log.warning("the journal %s was cut off, %d bytes into a record: these are left out", path, len(data) - at)
    try:
        setup = msgspec.msgpack.decode(frames[0], type=EngineSetup)
        decoded = [msgspec.msgpack.decode(frame, type=_Frame) for frame in frames[1:]]
        parts = [(frame.ring, _records(frame)) for frame in decoded]
        found = {name: [records for ring, records in parts if ring == name] for name in FIELDS}
        if not found["steps"]:
            raise ConfigError(f"the journal {path} holds no steps")
        empty = {name: np.zeros(0, list(fields)) for name, fields in FIELDS.items()}
        rings = {name: np.concatenate(each) if each else empty[name] for name, each in found.items()}
        rings = _without_ends(rings) if at < len(data) else rings
        _check(rings)
    except (msgspec.DecodeError, IndexError, ValueError, TypeError) as error:
        raise ConfigError(f"the journal {path} cannot be read: {error}") from None
    return Recording(setup, **rings, cache_reasons=tuple(decoded[-1].cache_reasons))


def recording_of(journal: Recording | Path | str) -> Recording:
    """Return a recording, or read the file of one. Raises ConfigError as `read_recording` does."""
    return journal if isinstance(journal, Recording) else read_recording(Path(journal))


def _records(frame: _Frame) -> Records:
    """Return the records of a frame. Raises ValueError where a field is not there, or of another type."""
    records: Records = np.frombuffer(frame.records, np.dtype(frame.fields))
    for field, kind in FIELDS.get(frame.ring, ()):
        if records[field].dtype != np.dtype(kind):
            raise ValueError(f"{field} of {frame.ring} is no {kind}")
    return records


def _check(rings: Mapping[str, Records]) -> None:
    """Raise ValueError for records that point at what is not there, or count what cannot be."""
    for name, first, count, others in (
        ("steps", "first_span", "num_spans", "spans"),
        ("outputs", "first_hash", "num_hashes", "prompts"),
    ):
        begins, counts = rings[name][first], rings[name][count]
        if ((begins < 0) | (counts < 0) | (begins + counts > len(rings[others]))).any():
            raise ValueError(f"{name} have {others} that are not there")
    steps, spans = rings["steps"], rings["spans"]
    computed = spans["num_tokens"] - spans["num_further"]
    if any((steps[name] < 1).any() for name in ("num_spans", "num_tokens", "num_rounds")) or (computed < 1).any():
        raise ValueError("a step computes nothing")


def _without_ends(rings: Mapping[str, Records]) -> dict[str, Records]:
    """Return the records of a file that was cut off, without those that point behind its end."""
    steps, outputs, decisions = rings["steps"], rings["outputs"], rings["decisions"]
    steps = steps[steps["first_span"] + steps["num_spans"] <= len(rings["spans"])]
    is_whole = outputs["first_hash"] + outputs["num_hashes"] <= len(rings["prompts"])
    outputs = outputs[is_whole & (outputs["last_step"] < len(steps))]
    decisions = decisions[decisions["step"] <= steps["step"].max(initial=0)]
    return {**rings, "steps": steps, "outputs": outputs, "decisions": decisions}
