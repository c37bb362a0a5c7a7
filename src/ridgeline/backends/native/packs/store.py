"""Which packs the cache folder holds: by what they are found, when they are written, and when they are removed.

    packs/<model>-<checkpoint>-<settings>.pack      three hashes: of the model's path, its weight files, everything

A cache that cannot be read or written costs a warning, never the start.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ridgeline.backends.native.packs.file import PARTIAL, Checksums, PackMapping, crc32s, open_pack, write_pack
from ridgeline.core.log import get_logger

MAX_BYTES = 32 << 30  # of all packs; beyond it the ones that were used longest ago go
FREE_BYTES = 1 << 30  # that a new pack leaves on the disk
NICENESS = 10  # of the thread that writes: steps go first

Bytes = npt.NDArray[np.uint8]

log = get_logger("packcache")


@dataclass(frozen=True, slots=True)
class PackName:
    """Says what a pack is made from. `key` covers all of it; the others tell which packs it replaces."""

    model: str
    checkpoint: str
    key: str

    @classmethod
    def of(cls, model: Path, weight_files: Sequence[Path], settings: Mapping[str, object]) -> "PackName":
        """Return the name for the weights of `model` as they are, and for `settings`: all else that decides the bytes.

        Raises OSError where a file cannot be looked at.
        """
        files = [(path.name, stat.st_size, stat.st_mtime_ns) for path in weight_files for stat in (path.stat(),)]
        return cls(_hash(str(model.resolve()))[:12], _hash(files)[:12], _hash([files, dict(settings)]))

    @property
    def file_name(self) -> str:
        return f"{self.model}-{self.checkpoint}-{self.key[:16]}.pack"


class PackStore:
    """The parts of one pack: found in the file of an earlier start, or added for the next one.

    `find` and `add` while the weights are laid out, then `commit`: a thread writes the pack behind the start, from
    arrays that must stay as they were added, and an interpreter that ends waits for it. A pack that would not fit, by
    `num_bytes` that all parts take, is not begun.
    """

    def __init__(
        self, folder: Path, name: PackName, num_bytes: int, checksums: Checksums = crc32s, max_bytes: int = MAX_BYTES
    ) -> None:
        self._folder, self._name, self._num_bytes = folder, name, num_bytes
        self._checksums, self._max_bytes = checksums, max_bytes
        self._path = folder / name.file_name
        self.found = open_pack(self._path, name.key, checksums) or {}  # what an earlier start left
        self._added: deque[tuple[str, memoryview]] = deque()  # and not written

    def find(self, name: str) -> Bytes | None:
        """Return the bytes of part `name`, read-only and mapped from the file, or None."""
        found = self.found.get(name)
        return None if found is None else np.frombuffer(found, dtype=np.uint8)

    @property
    def is_cut(self) -> bool:
        """Whether another program has cut off the file that parts were found in."""
        mapping = next((part.obj for part in self.found.values()), None)
        return isinstance(mapping, PackMapping) and mapping.guard.is_cut

    def add(self, name: str, data: Bytes) -> None:
        """Take part `name` for the pack."""
        self._added.append((name, data.data))

    def commit(self) -> None:
        """Write what was added behind all that was found: a pack has every part, or is not there."""
        if self._added:
            threading.Thread(target=self._write, name="pack-file").start()

    def _write(self) -> None:
        """Write the pack, and remove packs that are of no more use, or too much."""
        with contextlib.suppress(OSError):  # only Linux knows it of a thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._remove_useless()
            self._folder.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(self._folder).free
            if self._num_bytes > min(self._max_bytes, free_bytes - FREE_BYTES):
                raise OSError(f"no room for {self._num_bytes:,} bytes in {self._folder} ({free_bytes:,} free)")
            write_pack(self._path, self._name.key, self._parts(), self._checksums)
            self._remove_excess()
        except OSError as error:
            log.warning("packed weights could not be cached, the next start packs them again: %s", error)

    def _parts(self) -> Iterator[tuple[str, memoryview]]:
        yield from self.found.items()
        while self._added:  # what was written is no longer held: weights may have changed since
            yield self._added.popleft()

    def _remove_useless(self) -> None:
        """Remove packs of this model's earlier weight files, and files that nobody finished."""
        for path in self._folder.glob(f"*{PARTIAL}"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer would have it
                path.unlink()
        for path in self._folder.glob(f"{self._name.model}-*.pack"):
            if not path.name.startswith(f"{self._name.model}-{self._name.checkpoint}-"):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _remove_excess(self) -> None:
        """Remove other packs, those used longest ago first, until all together are within bounds."""
        sizes: dict[Path, tuple[float, int]] = {}
        for path in self._folder.glob("*.pack"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                sizes[path] = (stat.st_mtime, stat.st_size)
        total = sum(num_bytes for _, num_bytes in sizes.values())
        for path in sorted(sizes.keys() - {self._path}, key=lambda path: sizes[path]):
            if total <= self._max_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= sizes[path][1]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
