"""The file in which packed weights stay between starts, mapped into memory as it is.

    header    64 bytes: magic, version, where the index is, and checksums of the index and of the header itself
    parts     each at a multiple of 4096 bytes
    index     JSON to the end of the file: the key, and of every part its name, place and checksum

It is written in pieces of a huge page, each of which the system may then keep in one; mappings ask for that.
A file is written under another name and renamed when it is complete, and never changed after that: any number of
processes may map, replace or remove it at once. Should another program cut it off while it is mapped, what is lost
reads as zeros, and the mapping's guard tells. What is damaged, of another version or of another key is refused with a
warning, and the caller builds it again. Called by store.py. Must not import torch.
"""

import fcntl
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from ridgeline import _native
from ridgeline.backends.native.memory import address, ask_for_huge_pages
from ridgeline.core.log import get_logger

MAGIC = b"RIDGEPAK"
VERSION = 2
ALIGNMENT = 4096
PIECE_BYTES = 2 << 20
PARTIAL = ".partial"

Checksums = Callable[[Sequence[memoryview]], Sequence[int]]  # of each, unsigned, of up to 64 bits

_HEADER = struct.Struct("<8sIIQQ28xI")  # magic, version, crc of the index, its offset and bytes; crc of these 60 bytes

log = get_logger("packcache")


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    offset: int
    num_bytes: int
    checksum: int


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    parts: list[_Part]


def crc32s(parts: Sequence[memoryview]) -> list[int]:
    """Return the CRC-32 of each part."""
    return [zlib.crc32(part) for part in parts]


class PackMapping(mmap.mmap):
    """The mapped file, which the parts are views of: `part.obj`."""

    guard: _native.MapGuard


class _RefusedError(Exception):
    """The file is not what it should be; the message says why."""


def open_pack(path: Path, key: str, checksums: Checksums = crc32s) -> dict[str, memoryview] | None:
    """Return the parts of the pack at `path`, read-only and each at a multiple of 4096 bytes.

    None where it was not written under `key`, or where not every byte of it is as it was: a file that is there and
    refused is named in the log, with the reason.
    """
    try:
        with path.open("rb") as file:
            parts = _read(file, key, checksums)
        os.utime(path)  # the packs that were used longest ago are the first to be removed
    except FileNotFoundError:
        return None
    except (_RefusedError, OSError, ValueError) as error:
        log.warning("%s is not used, and will be built again: %s", path, error)
        return None
    return parts


def _read(file: BinaryIO, key: str, checksums: Checksums) -> dict[str, memoryview]:
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
    mapping = PackMapping(file.fileno(), num_bytes, access=mmap.ACCESS_READ)
    ask_for_huge_pages(mapping)
    view = memoryview(mapping)
    mapping.guard = _native.MapGuard(file.fileno(), address(np.frombuffer(view, np.uint8)), num_bytes)
    raw_index = view[index_offset:]
    if zlib.crc32(raw_index) != index_crc:
        raise _RefusedError("its index is damaged")
    index = msgspec.json.decode(raw_index, type=_Index)
    if index.key != key:
        raise _RefusedError("it was made from other files or settings")
    for part in index.parts:
        if not _HEADER.size <= part.offset <= part.offset + part.num_bytes <= index_offset or part.offset % ALIGNMENT:
            raise _RefusedError(f"part {part.name!r} is not within it")
    parts = {part.name: view[part.offset : part.offset + part.num_bytes] for part in index.parts}
    found = checksums([parts[part.name] for part in index.parts])
    damaged = [part.name for part, actual in zip(index.parts, found) if actual != part.checksum]
    if damaged:
        raise _RefusedError(f"part {damaged[0]!r} is damaged")
    return parts


def write_pack(path: Path, key: str, parts: Iterable[tuple[str, memoryview]], checksums: Checksums = crc32s) -> None:
    """Write a pack of parts, by name, as they come; it appears at `path`, whole or not at all, in another's place.

    Raises OSError where the disk does not take it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=PARTIAL, dir=path.parent)
    described: list[_Part] = []
    try:
        # Not synced: what a power cut leaves behind has wrong checksums, and costs one more build.
        with os.fdopen(descriptor, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a file that nobody has locked is one that nobody will finish
            for piece in _pieces(_sections(parts, described, checksums)):
                file.write(piece)
            index, end = msgspec.json.encode(_Index(key, described)), file.tell()
            file.write(index)
            header = _HEADER.pack(MAGIC, VERSION, zlib.crc32(index), end, len(index), 0)[:-4]
            file.seek(0)
            file.write(header + struct.pack("<I", zlib.crc32(header)))
        Path(partial).replace(path)
    except BaseException:  # Ctrl-C too leaves nothing behind
        Path(partial).unlink(missing_ok=True)
        raise


def _sections(
    parts: Iterable[tuple[str, memoryview]], described: list[_Part], checksums: Checksums
) -> Iterator[memoryview | bytes]:
    """Yield room for the header, then each part, which is then `described`."""
    yield bytes(ALIGNMENT)
    end = ALIGNMENT
    for name, data in parts:
        (checksum,) = checksums([data])
        described.append(_Part(name, end, data.nbytes, checksum))
        yield data
        yield bytes(-data.nbytes % ALIGNMENT)
        end += -(-data.nbytes // ALIGNMENT) * ALIGNMENT


def _pieces(sections: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """Yield the same bytes, PIECE_BYTES at a time."""
    piece, room = list[memoryview](), PIECE_BYTES
    for section in sections:
        left = memoryview(section)
        while left.nbytes:
            piece.append(left[:room])
            left, room = left[room:], room - piece[-1].nbytes
            if not room:
                yield piece[0] if len(piece) == 1 else b"".join(piece)
                piece, room = [], PIECE_BYTES
    yield b"".join(piece)
