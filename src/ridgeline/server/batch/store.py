"""The folder of /v1/files and /v1/batches: contents as files, and beside each object a file that describes it.

All descriptions are in memory too, and ids are looked up there: no name that a client gives becomes a path.
"""

import fcntl
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from starlette.exceptions import HTTPException

from ridgeline.core.errors import ConfigError, RequestError
from ridgeline.server.batch.lines import Problem, Usage
from ridgeline.server.openai.protocol import Metadata

ENDED = ("completed", "failed", "expired", "cancelled")
T = TypeVar("T", "StoredFile", "Batch")


class StoredFile(msgspec.Struct, kw_only=True, tag_field="object", tag="file"):
    """A file as OpenAI's API has it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    expires_at: int | None = None
    status: str = "processed"


class Problems(msgspec.Struct):
    """Lists what is wrong with an input."""

    data: list[Problem]
    object: str = "list"


class Counts(msgspec.Struct):
    """Counts the lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True, tag_field="object", tag="batch"):
    """A batch as OpenAI's API has it."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: str = "validating"
    errors: Problems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    model: str | None = None
    usage: Usage = msgspec.field(default_factory=Usage)
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: Metadata | None = None


class Stored(msgspec.Struct, kw_only=True):
    """An object and whose it is."""

    owner: str  # the name of a key
    about: StoredFile | Batch
    outputs: tuple[str, str] = ("", "")  # of a batch: ids for its output and error file, which it writes as it runs
    output_age_s: int | None = None  # after which those expire


_STORED = msgspec.json.Decoder(Stored)


def new_id(prefix: str) -> str:
    """Make an id that none can guess; later ones sort behind."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


class Folder:
    """Keeps objects in `root`, for one server. Raises ConfigError for a folder that cannot be used."""

    def __init__(self, root: Path) -> None:
        self._root, self._scratch = root, root / "scratch"
        self._writing = threading.Lock()
        self.num_arriving = 0  # uploads under way
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (root / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch.mkdir(mode=0o700)
            described = (*root.glob("file-*.json"), *root.glob("batch_*.json"))
            stored = [_STORED.decode(path.read_bytes()) for path in described]
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"--files {root}: another server has this folder") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"--files {root}: {error}") from error
        self._stored = {each.about.id: each for each in sorted(stored, key=lambda each: each.about.id)}
        known = {name for stored, _ in self.unfinished() for name in stored.outputs} | self._stored.keys()
        for path in root.glob("file-*.jsonl"):
            if path.stem not in known:  # it was arriving, or being deleted
                path.unlink()

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock.close()

    def path(self, file_id: str) -> Path:
        """Return where the content of a file is; the id is one of ours."""
        return self._root / f"{file_id}.jsonl"

    def put(self, stored: Stored) -> None:
        """Write an object as it is now, from any thread: it is on disk, whole, when this returns. Raises OSError."""
        name = f"{stored.about.id}.json"
        with self._writing:
            with (self._scratch / name).open("wb") as file:
                file.write(msgspec.json.encode(stored))
                file.flush()
                os.fsync(file.fileno())
            (self._scratch / name).replace(self._root / name)
            folder = os.open(self._root, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            self._stored[stored.about.id] = stored

    def listed(self, owner: str, kind: type[T]) -> list[T]:
        """Return an owner's objects that have not expired, oldest first."""
        now_s, own = time.time(), [each.about for each in self._stored.values() if each.owner == owner]
        found = [about for about in own if isinstance(about, kind)]
        late = [each for each in found if isinstance(each, StoredFile) and (each.expires_at or now_s) < now_s]
        for each in [one for one in late if not self._readers(one.id)]:
            self._remove(each.id)
        return [each for each in found if each not in late]

    def get(self, owner: str, object_id: str, kind: type[T]) -> T:
        """Return an owner's object. Raises HTTPException 404, for those of others as well."""
        found = next((each for each in self.listed(owner, kind) if each.id == object_id), None)
        if found is None:
            raise HTTPException(404, f"No such {'file' if kind is StoredFile else 'batch'}: '{object_id[:100]}'.")
        return found

    def delete(self, owner: str, file_id: str) -> None:
        """Forget a file. Raises HTTPException 404, and RequestError while a batch reads it."""
        file = self.get(owner, file_id, StoredFile)
        if readers := self._readers(file.id):
            raise RequestError(f"{readers[0]} reads this file: cancel it first, or wait for its end")
        self._remove(file.id)

    def unfinished(self) -> list[tuple[Stored, Batch]]:
        """Return all owners' batches that have not ended."""
        batches = [(each, each.about) for each in self._stored.values() if isinstance(each.about, Batch)]
        return [(stored, batch) for stored, batch in batches if batch.status not in ENDED]

    def _readers(self, file_id: str) -> list[str]:
        return [batch.id for _, batch in self.unfinished() if batch.input_file_id == file_id]

    def _remove(self, object_id: str) -> None:
        del self._stored[object_id]
        (self._root / f"{object_id}.json").unlink(missing_ok=True)
        self.path(object_id).unlink(missing_ok=True)
