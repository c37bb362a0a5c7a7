"""Which packs the cache folder holds: by what they are found, when they are written, and when they are removed.

    packs/<model>-<checkpoint>-<settings>.pack      three hashes: of the model's path, its weight files, everything

A cache that cannot be read or written costs a warning, never the start.
"""

import contextlib
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from ridgeline.backends.native.packs.file import PARTIAL, Checksums, PackMapping, crc32s, open_pack, write_pack
from ridgeline.core.log import get_logger

MAX_BYTES = 32 << 30  # of all packs; beyond it the ones that were used longest ago go
FREE_BYTES = 1 << 30  # that a new pack leaves on the disk
ABANDONED_S = 3600.0  # without a write, after which an unfinished file is one that nobody will finish

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

    `find` and `add` while the weights are laid out, then `commit`, and `close` also where that failed. Parts are
    written in a thread while the next ones are made; arrays given to `add` must stay until `commit`. A pack that would
    not fit, by `num_bytes` that all parts take, is not begun.
    """

    def __init__(
        self, folder: Path, name: PackName, num_bytes: int, checksums: Checksums = crc32s, max_bytes: int = MAX_BYTES
    ) -> None:
        self._folder, self._name, self._num_bytes = folder, name, num_bytes
        self._checksums, self._max_bytes = checksums, max_bytes
        self._path = folder / name.file_name
        self._found = open_pack(self._path, name.key, checksums) or {}
        self._writer: threading.Thread | None = None  # from the first part that is added
        self._parts: SimpleQueue[tuple[str, memoryview] | None] = SimpleQueue()  # to be written; None: no more come
        self._is_complete = False

    def find(self, name: str) -> Bytes | None:
        """Return the bytes of part `name`, read-only and mapped from the file, or None."""
        found = self._found.get(name)
        return None if found is None else np.frombuffer(found, dtype=np.uint8)

    @property
    def is_empty(self) -> bool:
        """Whether no earlier start has left a pack."""
        return not self._found

    @property
    def is_cut(self) -> bool:
        """Whether another program has cut off the file that parts were found in."""
        mapping = next((part.obj for part in self._found.values()), None)
        return isinstance(mapping, PackMapping) and mapping.guard.is_cut

    def add(self, name: str, data: Bytes) -> None:
        """Write part `name` in the thread, behind all that was found: a pack has every part, or is not there."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="pack-file", daemon=True)
            self._writer.start()
            for part in self._found.items():
                self._parts.put(part)
        self._parts.put((name, data.data))

    def commit(self) -> None:
        """Wait until what was added is written, and the pack in its place."""
        self._is_complete = True
        self.close()

    def close(self) -> None:
        """End the writing; nothing stays of what was not committed."""
        if self._writer is not None:
            self._parts.put(None)
            self._writer.join()
            self._writer = None

    def _write(self) -> None:
        """Write what comes, and remove packs that are of no more use, or too much."""
        try:
            self._remove_useless()
            self._folder.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(self._folder).free
            if self._num_bytes > min(self._max_bytes, free_bytes - FREE_BYTES):
                raise OSError(f"no room for {self._num_bytes:,} bytes in {self._folder} ({free_bytes:,} free)")
            write_pack(self._path, self._name.key, self._added(), self._checksums)
            self._remove_excess()
        except OSError as error:
            log.warning("packed weights could not be cached, the next start packs them again: %s", error)

    def _added(self) -> Iterator[tuple[str, memoryview]]:
        """Yield the parts to write, as they come. Raises OSError where not all of them came."""
        while (part := self._parts.get()) is not None:
            yield part
        if not self._is_complete:
            raise OSError("the weights were not all laid out")

    def _remove_useless(self) -> None:
        """Remove packs of this model's earlier weight files, and files that nobody finished."""
        now_s = time.time()
        for path in self._folder.glob(f"*{PARTIAL}"):
            with contextlib.suppress(OSError):
                if now_s - path.stat().st_mtime > ABANDONED_S:
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
