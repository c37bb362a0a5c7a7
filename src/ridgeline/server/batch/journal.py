"""Journal: a file of results that only grows, and is whole lines after any end of the process."""

import asyncio
import fcntl
import os
import threading
from array import array
from pathlib import Path

import msgspec

from ridgeline.core.errors import ConfigError
from ridgeline.server.batch.lines import Result, Usage

_RESULT = msgspec.json.Decoder(Result)


class Journal:
    """Holds results, each on disk when `add` returns. Raises OSError, and ConfigError for a file that is another's."""

    def __init__(self, path: Path) -> None:
        self.keys, self.asked = array("Q"), array("Q")  # digests of the results that were there
        self.num_ok = 0  # of those
        self.usage = Usage()
        self._waiting = bytearray()
        self._turn, self._writing = asyncio.Lock(), threading.Lock()
        self._file = path.open("ab+", buffering=0)
        try:
            self._begin(path)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, path: Path) -> None:
        """Read what is there, and cut off what a kill has left of a line."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path} is being written by another process") from None
        self._num_bytes = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    result = _RESULT.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    fix = "give another file, or delete it to begin anew"
                    raise ConfigError(f"{path}, line {number}, is no result of a batch: {error}; {fix}") from error
                self.keys.append(result.key)
                self.asked.append(result.asked)
                self.num_ok += result.is_ok
                self.usage.add(result)
                self._num_bytes += len(line)
        self._file.truncate(self._num_bytes)

    async def add(self, *results: Result) -> None:
        """Write results, with all that wait meanwhile. After an OSError they wait for the next `add`, or `close`."""
        for result in results:
            self._waiting += msgspec.json.encode(result) + b"\n"
        async with self._turn:
            await asyncio.to_thread(self._flush)

    def close(self) -> None:
        """Write what waits, and close the file."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        """Write all or nothing; a caller that is cancelled leaves this to its thread, and `close` waits for it."""
        with self._writing:
            data = bytes(self._waiting)
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._file.fileno(), data[written:])
            except OSError:
                self._file.truncate(self._num_bytes)
                raise
            if data:
                os.fdatasync(self._file.fileno())
                self._num_bytes += len(data)
                del self._waiting[: len(data)]
