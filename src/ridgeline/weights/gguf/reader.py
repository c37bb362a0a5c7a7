"""Read the header of a GGUF file, and the bytes of its tensors.

The file is untrusted: every count, length and offset is compared with the file's size before anything is allocated or
read, and each defect is one ModelLoadError that names the file, what is wrong and the value. Bytes are read, never
mapped: a file that shrinks while it is in use is an error, not a SIGBUS. Knows nothing of models.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import Bytes
from ridgeline.weights.gguf.types import OTHER_NAMES, TYPES, GgufType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has other widths; a big-endian file shows as version 0x03000000
MAX_ENTRIES = 1 << 17  # metadata keys, and tensors
MAX_ARRAY_ITEMS = 1 << 22
MAX_NAME_BYTES = 1024
MAX_STRING_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 48
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: Mapping[int, str] = {
    **dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1"))),  # the last of these is BOOL
    **dict(enumerate(("<u8", "<i8", "<f8"), start=10)),
}
MIN_BYTES_OF_STRING = 8
MIN_BYTES_OF_ENTRY = 13  # key length, type, one byte of value
MIN_BYTES_OF_TENSOR = 32  # name length, number of dims, one dim, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is in its file; `shape` has the dims in the order of torch, slowest first."""

    file: Path
    shape: tuple[int, ...]
    type: GgufType
    offset: int  # from the start of the file
    num_bytes: int

    def rows(self, begin: int, end: int) -> "GgufTensor":
        """Return the part of the tensor with these indices of its first dimension, whose bytes are consecutive."""
        row_bytes = self.num_bytes // self.shape[0]
        shape = (end - begin, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + begin * row_bytes, num_bytes=(end - begin) * row_bytes)

    def matrix(self, index: int) -> "GgufTensor":
        """Return one matrix of a stack."""
        return replace(self.rows(index, index + 1), shape=self.shape[1:])

    def read(self) -> Bytes:
        """Read the stored bytes, uint8. Raises ModelLoadError where the file has become shorter or unreadable."""
        data = np.empty(self.num_bytes, dtype=np.uint8)
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset)
                view, done = data.data, 0
                while done < self.num_bytes and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise ModelLoadError(f"{self.file} cannot be read: {error.strerror}") from error
        if done < self.num_bytes:
            raise ModelLoadError(f"{self.file} has become shorter since it was opened; load the model again")
        return data


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A header that has been checked. `metadata` values are int, float, bool, str, or a list of one of them."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Open a file. Raises ModelLoadError where it is missing, not GGUF, broken, hostile or has an unknown type."""
        try:
            if not path.is_file():  # a FIFO would block for ever
                raise ModelLoadError(f"{path} is missing or is not a regular file")
            with path.open("rb", buffering=1 << 20) as file:
                return _Parser(path, file, path.stat().st_size).parse()
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error


class _Parser:
    """One pass over the header; `_left` is how many bytes the file still has."""

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self._path, self._file, self._num_bytes = path, file, num_bytes
        self._left = num_bytes

    def parse(self) -> GgufFile:
        if self._num_bytes < 24 or self._take(4) != MAGIC:
            self._fail("it does not begin with 'GGUF' and a header; it is no GGUF file")
        version = self._number("<I")
        if version not in VERSIONS:
            self._fail(f"its version is {version}; versions 2 and 3, little-endian, are read")
        num_tensors = self._count("tensors", self._number("<Q"), MIN_BYTES_OF_TENSOR, MAX_ENTRIES)
        num_keys = self._count("metadata keys", self._number("<Q"), MIN_BYTES_OF_ENTRY, MAX_ENTRIES)
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", MAX_NAME_BYTES)
            if not key or key in metadata:
                self._fail(f"metadata key {key[:80]!r} is {'there twice' if key else 'empty'}")
            metadata[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return GgufFile(self._path, metadata, self._place(infos, self._alignment(metadata)))

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & value - 1:
            self._fail(f"general.alignment is {str(value)[:80]}; it must be a power of two from 8 to {MAX_ALIGNMENT}")
        return value

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GgufType, int]:
        """Read the name, shape, type, and offset within the tensor data."""
        name = self._string("a tensor name", MAX_NAME_BYTES)
        num_dims = self._number("<I")
        if not name or not 1 <= num_dims <= 4:
            self._fail(f"tensor {name[:80]!r} has {num_dims} dims; a tensor has a name and 1 to 4 dims")
        dims = tuple(self._number("<Q") for _ in range(num_dims))
        if not 1 <= math.prod(dims) <= MAX_ELEMENTS or max(dims) > MAX_ELEMENTS:
            self._fail(f"tensor {name[:80]!r} has dims {dims}; from 1 to {MAX_ELEMENTS} elements are possible")
        number, offset = self._number("<I"), self._number("<Q")
        if number not in TYPES:
            known = ", ".join(sorted(kind.name for kind in TYPES.values()))
            found = f"tensor {name[:80]!r} has type {OTHER_NAMES.get(number, number)}, which is not supported"
            self._fail(f"{found}; supported: {known}; take a file of the same model with these")
        kind = TYPES[number]
        if dims[0] % kind.block:
            self._fail(f"tensor {name[:80]!r} has rows of {dims[0]}, no multiple of the {kind.block} of {kind.name}")
        return name, dims[::-1], kind, offset

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], GgufType, int]], alignment: int
    ) -> Mapping[str, GgufTensor]:
        """Return the tensors with their places, found to lie in the file, aligned, and apart."""
        header_bytes = self._num_bytes - self._left
        start = -(-header_bytes // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            num_bytes = kind.num_bytes(shape)
            if name in tensors:
                self._fail(f"tensor {name[:80]!r} is there twice")
            if offset % alignment:
                self._fail(f"tensor {name[:80]!r} is at {offset}, no multiple of the alignment {alignment}")
            if (end := start + offset + num_bytes) > self._num_bytes:
                ends = f"tensor {name[:80]!r} ends at byte {end}, the file at {self._num_bytes}"
                self._fail(f"{ends}; it was cut off or damaged")
            tensors[name] = GgufTensor(self._path, shape, kind, start + offset, num_bytes)
        by_offset = sorted(tensors, key=lambda name: tensors[name].offset)
        for name, after in zip(by_offset, by_offset[1:]):
            if tensors[name].offset + tensors[name].num_bytes > tensors[after].offset:
                self._fail(f"tensors {name[:80]!r} and {after[:80]!r} overlap")
        return tensors

    def _value(self, key: str) -> object:
        kind = self._number("<I")
        if kind == STRING:
            return self._string(f"the value of {key[:80]!r}", MAX_STRING_BYTES)
        if kind == ARRAY:
            return self._array(key)
        return self._scalars(key, kind, 1)[0]

    def _array(self, key: str) -> list[object]:
        kind, what = self._number("<I"), f"items of {key[:80]!r}"
        least = MIN_BYTES_OF_STRING if kind == STRING else 1
        count = self._count(what, self._number("<Q"), least, MAX_ARRAY_ITEMS)
        if kind == STRING:
            what = f"a string of {key[:80]!r}"
            return [self._string(what, MAX_STRING_BYTES) for _ in range(count)]
        return self._scalars(key, kind, count)

    def _scalars(self, key: str, kind: int, count: int) -> list[object]:
        if kind not in SCALARS:
            self._fail(f"metadata key {key[:80]!r} has a value of type {kind}, which is not known here")
        dtype = np.dtype(SCALARS[kind])
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        if kind != BOOL:
            return values.tolist()
        if (values > 1).any():
            self._fail(f"metadata key {key[:80]!r} has the boolean {int(values.max())}; it must be 0 or 1")
        return (values == 1).tolist()

    def _string(self, what: str, limit_bytes: int) -> str:
        length = self._number("<Q")
        if length > min(limit_bytes, self._left):
            self._fail(f"{what} has {length} bytes; the file has {self._left} left, and {limit_bytes} are allowed")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8 text")

    def _count(self, what: str, count: int, least_bytes: int, limit: int) -> int:
        if count > limit or count * least_bytes > self._left:
            self._fail(f"it declares {count} {what}; the file has {self._left} bytes left, and {limit} are allowed")
        return count

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._left:
            self._fail(f"it is cut off: {num_bytes} more bytes were expected, {self._left} are left")
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            self._fail("it has become shorter while it was read")
        self._left -= num_bytes
        return data

    def _fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self._path}: {what}")
