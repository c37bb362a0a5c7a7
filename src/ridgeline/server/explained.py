"""Run commands that look at the engine: each in a process of its own, after all else here, one at a time.

A client may ask where the time of its own requests went, of the last ones, as long as the journal has their steps.
"""

import asyncio
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.exceptions import HTTPException

from ridgeline.core.errors import OverloadedError, RequestError
from ridgeline.engine.client import EngineClient
from ridgeline.server.clients import Client

MAX_EXPLAIN_S = 60
MAX_REQUESTS = 2000  # that are remembered
MAX_OUTPUTS = 8  # of one request
JOURNAL_S = 3.0  # after which the end of a request must be in the journal


class Explained:
    """Runs commands, and remembers by which numbers the journal knows the outputs of the last requests."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.running = asyncio.Lock()  # held while a command runs
        self._sequences: dict[tuple[str, str], tuple[int | None, list[int]]] = {}  # by client and id, with its engine

    def ended(self, request_id: str, client: Client, response_id: str, seq_id: int) -> None:
        """Note that an output of a request has ended. It is found by its response's id, and by its own."""
        entry = self._sequences.get((client.salt, response_id))
        if entry is None:
            entry = self._engine.process_id, []
            for name in (response_id, request_id):
                self._sequences.pop((client.salt, name), None)
                self._sequences[client.salt, name] = entry
            while len(self._sequences) > 2 * MAX_REQUESTS:
                del self._sequences[next(iter(self._sequences))]
        if seq_id >= 0 and len(entry[1]) < MAX_OUTPUTS:
            entry[1].append(seq_id)

    async def of(self, client: Client, name: str) -> bytes:
        """Return as JSON where the time of each output of a client's request went.

        Raises HTTPException 404 where that is not known, or not any more, and what `say` does.
        """
        process_id, seq_ids = self._sequences.get((client.salt, name), (None, []))
        if not seq_ids or process_id != self._engine.process_id:  # another one numbers them anew
            raise HTTPException(404, f"no request {name[:100]!r} of this key is among the last {MAX_REQUESTS} to end")
        for _ in range(int(JOURNAL_S / 0.05)):
            if np.isin(seq_ids, self._engine.journal.outputs.read()[1]["seq_id"]).all():
                break
            await asyncio.sleep(0.05)  # the journal of another process comes a moment later
        try:
            said = await self.doctor([f"--request={seq_id}" for seq_id in seq_ids])
        except RequestError as error:
            raise HTTPException(404, f"the journal has no longer what {name[:100]!r} went through: {error}") from None
        found = said["found"] if len(seq_ids) > 1 else [said["found"]]
        return msgspec.json.encode({"id": name, "outputs": found})

    async def doctor(self, arguments: Sequence[str]) -> Mapping[str, Any]:
        """Return what `ridgeline doctor` says of the last steps. Raises what `say` does."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recent.journal"
            await asyncio.to_thread(self._engine.write_journal, path)
            return await self.say("doctor", str(path), *arguments)

    async def say(self, *arguments: str) -> Mapping[str, Any]:
        """Return what a command says, one at a time.

        Raises OverloadedError where others take long, RequestError for what it refuses, and after MAX_EXPLAIN_S.
        """
        try:
            await asyncio.wait_for(self.running.acquire(), MAX_EXPLAIN_S)
        except TimeoutError:
            raise OverloadedError("the server explains something else; ask again in a moment") from None
        try:
            return await asyncio.to_thread(reply_of, *arguments)
        finally:
            self.running.release()


def reply_of(*arguments: str) -> Mapping[str, Any]:
    """Run a command, and return it with the JSON that it prints. Raises RequestError."""
    line = ["nice", "-n", "19", sys.executable, "-m", "ridgeline", *arguments, "--json"]
    try:
        done = subprocess.run(line, capture_output=True, timeout=MAX_EXPLAIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise RequestError(f"it takes more than {MAX_EXPLAIN_S} s: ask for less, or a command line") from None
    if not done.stdout:
        *_, said = done.stderr.decode(errors="replace").splitlines() or [""]  # before it may be warnings
        raise RequestError(said.removeprefix("ridgeline: ")[-500:])
    return {"command": shlex.join(["ridgeline", *arguments]), "found": msgspec.Raw(done.stdout.strip())}
