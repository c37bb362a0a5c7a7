"""Checkpoint: the tensors of a model folder by their names on disk, memory-mapped from safetensors.

The official safetensors library checks the headers; its own numpy side would copy the arrays, which are views here.
"""

import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ridgeline.core.dtypes import BFLOAT16, FLOAT8_E4M3, FLOAT32, Array
from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.jsonfile import read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS: Mapping[str, np.dtype[Any]] = {"F32": FLOAT32, "F16": np.dtype(np.float16), "BF16": BFLOAT16}
DTYPES: Mapping[str, np.dtype[Any]] = {
    **FLOATS,
    **{f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)},
    "F64": np.dtype(np.float64),
    "F8_E4M3": FLOAT8_E4M3,
    "F8_E8M0": np.dtype(np.uint8),  # exponents, as they are stored
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "BOOL": np.dtype(np.bool_),
}
WHOLE = (slice(None),)
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is and what its header says; `dtype` is safetensors' spelling (F32, BF16, ...).

    `offset` is the byte of the file where it begins; None where it is not stored there as it is read.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of a stored tensor of a type that is read."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a folder: opening reads headers only."""

    path: Path
    entries: Mapping[str, TensorEntry]
    # A file is mapped once for all views of it, and no longer than there are any.
    _mapped: WeakValueDictionary[Path, mmap.mmap] = field(default_factory=WeakValueDictionary, repr=False)

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Open a folder. Raises ModelLoadError for a missing, broken or inconsistent file, naming it."""
        entries: dict[str, TensorEntry] = {}
        expected = _index(folder)
        for file in _files(folder, expected):
            for name, entry in _headers(file):
                if (other := entries.get(name)) is not None:
                    raise ModelLoadError(f"{folder}: tensor {name!r} is in {other.file.name} and in {file.name}")
                entries[name] = entry
        for name, shard in expected.items():
            if name not in entries or entries[name].file.name != shard:
                raise ModelLoadError(f"{folder / INDEX} says that {name!r} is in {shard}, and it is not")
        return cls(folder, entries)

    @classmethod
    def of_file(cls, file: Path) -> "Checkpoint":
        """Open one safetensors file. Raises ModelLoadError for a broken one."""
        return cls(file.parent, dict(_headers(file)))

    def tensor(self, name: str) -> Array:
        """Return a view of the mapped file, private to this process (writes are not saved).

        Only what is read of it is read from the file. Raises ModelLoadError for a type that is not read here.
        """
        entry = self.entries[name]
        memory = self._mapped.get(entry.file)
        if memory is None:
            memory = self._mapped[entry.file] = _map(entry.file)
        return _view(memory, name, entry)

    def read(self, name: str, dim: int, ranges: Sequence[slice]) -> Array:
        """Return `ranges` of the tensor along `dim`, one after the other; a single one is a view."""
        return take_ranges(self.tensor(name), dim, ranges)


def take_ranges(array: Array, dim: int, ranges: Sequence[slice]) -> Array:
    """Return `ranges` of an array along `dim`, one after the other; a single one is a view."""
    parts = [array[(slice(None),) * dim + (part,)] for part in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)


def _index(folder: Path) -> Mapping[str, str]:
    """Return the shard file name of every tensor; empty where the folder has no index."""
    path = folder / INDEX
    if not path.exists() or (folder / SINGLE).exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map must be an object that names a shard file for every tensor")
    result: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not isinstance(name, str) or not shard.endswith(".safetensors"):
            raise ModelLoadError(f"{path}: {str(name)[:100]!r} names {shard!r:.100}, which is no .safetensors file")
        if PurePosixPath(shard).name != shard or "\\" in shard or "\0" in shard:
            raise ModelLoadError(f"{path}: shard {shard[:100]!r} is not a plain file name within the folder")
        result[name] = shard
    return result


def _files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    if index:
        return [folder / shard for shard in sorted(set(index.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelLoadError(f"{folder} has {len(found)} .safetensors files and no {INDEX}; which belong together?")
    other = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_FORMATS)
    if other:
        advice = "convert them to safetensors, for example with transformers' save_pretrained"
        raise ModelLoadError(f"{folder} has weights only as {', '.join(other[:3])}; {advice}")
    raise ModelLoadError(f"{folder} has no weights: {SINGLE} or {INDEX} is missing")


def _headers(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    """Yield what the header says, which safetensors has found to be valid and to cover the file exactly."""
    if not file.is_file():
        raise ModelLoadError(f"{file} is missing or is not a regular file; download the model again")
    try:
        with safe_open(file, framework="np"):
            pass
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(header_bytes))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is not a valid safetensors file: {error!s:.200}; download it again") from error
    for name, entry in header.items():
        if name != "__metadata__":
            offset = 8 + header_bytes + entry["data_offsets"][0]
            yield name, TensorEntry(file, tuple(entry["shape"]), entry["dtype"], offset)


def metadata_of(file: Path) -> Mapping[str, str]:
    """Return what the header of a file that has been opened says beside its tensors."""
    with safe_open(file, framework="np") as opened:
        return opened.metadata() or {}


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {str(error)[:200]}; download it again") from error


def _view(memory: mmap.mmap, name: str, entry: TensorEntry) -> Array:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ModelLoadError(f"{entry.file}: tensor {name[:100]!r} is {entry.dtype}, which is not read here")
    begin, num_bytes = entry.offset or 0, math.prod(entry.shape) * dtype.itemsize
    if begin + num_bytes > len(memory):
        raise ModelLoadError(f"{entry.file} has become shorter since it was opened; load the model again")
    view = np.frombuffer(memory, np.uint8, num_bytes, begin)
    aligned = view if begin % dtype.itemsize == 0 else view.copy()
    return aligned.view(dtype).reshape(entry.shape)
