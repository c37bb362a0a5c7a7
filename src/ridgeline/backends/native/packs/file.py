"""The file in which packed weights stay between starts, mapped into memory as it is.

    header    64 bytes: magic, version, where the index is, and checksums of the index and of the header itself
    parts     each at a multiple of 4096 bytes
    index     JSON to the end of the file: the key, and of every part its name, meta, place and checksum

A file is written under another name and renamed when it is complete, and never changed after that: any number of
processes may map, replace or remove it at once. What is damaged, of another version or of another key is refused with a
warning, and the caller builds it again. Called by store.py. Must not import torch.
"""

import contextlib
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ridgeline.core.log import get_logger

MAGIC = b"RIDGEPAK"
VERSION = 1
ALIGNMENT = 4096
PARTIAL = ".partial"

Checksums = Callable[[Sequence[memoryview]], Sequence[int]]  # of each, unsigned, of up to 64 bits

_HEADER = struct.Struct("<8sIIQQ28xI")  # magic, version, crc of the index, its offset and bytes; crc of these 60 bytes

log = get_logger("packcache")


@dataclass(frozen=True, slots=True)
class PackEntry:
    """One part: what its writer said of it, and its bytes, read-only and at a multiple of 4096 bytes."""

    meta: Mapping[str, object]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Pack:
    """Holds a whole and undamaged file. The mapping lives as long as a view of it does."""

    path: Path
    entries: Mapping[str, PackEntry]


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    meta: dict[str, object]
    offset: int
    num_bytes: int
    checksum: int


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    parts: list[_Part]


def crc32s(parts: Sequence[memoryview]) -> list[int]:
    """Return the CRC-32 of each part."""
    return [zlib.crc32(part) for part in parts]


class _RefusedError(Exception):
    """The file is not what it should be; the message says why."""


def open_pack(path: Path, key: str, checksums: Checksums = crc32s) -> Pack | None:
    """Return the pack at `path` if it was written under `key` and every byte of it is as it was; None otherwise.

    A file that is there and refused is named in the log, with the reason.
    """
    try:
        with path.open("rb") as file:
            pack = _read(path, file, key, checksums)
        os.utime(path)  # the packs that were used longest ago are the first to be removed
    except FileNotFoundError:
        return None
    except (_RefusedError, OSError, msgspec.MsgspecError) as error:
        log.warning("%s is not used, and will be built again: %s", path, error)
        return None
    return pack


def _read(path: Path, file: BinaryIO, key: str, checksums: Checksums) -> Pack:
    num_bytes = os.fstat(file.fileno()).st_size
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise _RefusedError(f"it is cut off after {num_bytes} bytes")
    magic, version, index_crc, index_offset, index_bytes, header_crc = _HEADER.unpack(header)
    if magic != MAGIC:
        raise _RefusedError("it is no pack of weights")
    if version != VERSION:
        raise _RefusedError(f"it has version {version}, and this program writes version {VERSION}")
    if header_crc != zlib.crc32(header[:-4]):
        raise _RefusedError("its header is damaged")
    if index_offset + index_bytes != num_bytes:
        raise _RefusedError(f"it has {num_bytes} bytes instead of {index_offset + index_bytes}")
    view = memoryview(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ))
    raw_index = view[index_offset:]
    if zlib.crc32(raw_index) != index_crc:
        raise _RefusedError("its index is damaged")
    index = msgspec.json.decode(raw_index, type=_Index)
    if index.key != key:
        raise _RefusedError("it was made from other files or settings")
    for part in index.parts:
        if not _HEADER.size <= part.offset <= part.offset + part.num_bytes <= index_offset or part.offset % ALIGNMENT:
            raise _RefusedError(f"part {part.name!r} is not within it")
    entries = {
        part.name: PackEntry(part.meta, view[part.offset : part.offset + part.num_bytes]) for part in index.parts
    }
    found = checksums([entries[part.name].data for part in index.parts])
    damaged = [part.name for part, actual in zip(index.parts, found) if actual != part.checksum]
    if damaged:
        raise _RefusedError(f"part {damaged[0]!r} is damaged")
    return Pack(path, entries)


class PackWriter:
    """Writes a pack part by part; it appears at `path` on `commit`, or not at all.

    Raises OSError where the disk does not take it; the file written so far is then removed.
    """

    def __init__(self, path: Path, key: str, checksums: Checksums = crc32s) -> None:
        self._path, self._key, self._checksums = path, key, checksums
        self._parts: list[_Part] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=PARTIAL, dir=path.parent)
        self._partial = Path(partial)
        self._file = os.fdopen(descriptor, "wb")

    def add(self, name: str, meta: Mapping[str, object], data: memoryview) -> None:
        """Append a part; `meta` is written as JSON, `data` is any contiguous buffer."""
        data = data.cast("B") if data.nbytes else memoryview(b"")
        offset = -(-max(self._file.tell(), _HEADER.size) // ALIGNMENT) * ALIGNMENT
        self._write(offset, data)
        self._parts.append(_Part(name, dict(meta), offset, data.nbytes, self._checksums([data])[0]))

    def commit(self) -> None:
        """Complete the file and put it in its place, where it may replace another one."""
        index = msgspec.json.encode(_Index(self._key, self._parts))
        offset = max(self._file.tell(), _HEADER.size)
        self._write(offset, memoryview(index))
        fields = (MAGIC, VERSION, zlib.crc32(index), offset, len(index))
        header = _HEADER.pack(*fields, 0)[:-4]
        self._write(0, memoryview(header + struct.pack("<I", zlib.crc32(header))))
        # Not synced: what a power cut leaves behind has wrong checksums, and costs one more build.
        try:
            self._file.close()
            self._partial.replace(self._path)
        except OSError:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            self._file.close()  # may fail to write bytes that nobody will read
        self._partial.unlink(missing_ok=True)

    def _write(self, offset: int, data: memoryview) -> None:
        try:
            self._file.seek(offset)
            self._file.write(data)
        except OSError:
            self.discard()
            raise
