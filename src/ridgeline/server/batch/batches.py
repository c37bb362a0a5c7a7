"""/v1/batches: files of requests that run behind all others, and go on after a restart where they were."""

import asyncio
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from itertools import islice
from typing import Literal

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ridgeline.core.errors import RequestError
from ridgeline.core.log import get_logger
from ridgeline.server.batch.files import MAX_OBJECTS, ExpiresAfter, batches_of
from ridgeline.server.batch.journal import Journal
from ridgeline.server.batch.lines import MAX_TOLD, Line, Problem, Result, Url, Work
from ridgeline.server.batch.run import run_lines
from ridgeline.server.batch.store import ENDED, Batch, Folder, Problems, Stored, StoredFile, new_id
from ridgeline.server.openai.paging import page
from ridgeline.server.openai.protocol import Metadata
from ridgeline.server.service import RequestNote, Service, note_of

log = get_logger("server")

WINDOW_S = 24 * 3600
AGAIN_S = 30.0  # a batch that could not write, because the disk is full, tries again then
MAX_LINES = 50_000


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Url
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


async def list_batches(service: Service, http: HttpRequest) -> Response:
    """List the client's batches. Raises what errors.py maps."""
    found = batches_of(service).folder.listed(note_of(http).client.salt, Batch)
    return page([(each.id, each) for each in found], http.query_params)


async def create_batch(service: Service, http: HttpRequest, body: BatchRequest) -> Response:
    """Make a batch, which begins. Raises what errors.py maps."""
    folder, owner = batches_of(service).folder, note_of(http).client.salt
    if folder.get(owner, body.input_file_id, StoredFile).purpose != "batch":
        raise RequestError("the input of a batch is a file of purpose batch", param="input_file_id")
    if len(folder.listed(owner, Batch)) >= MAX_OBJECTS:
        raise RequestError(f"this key has {MAX_OBJECTS} batches; the operator may remove old ones")
    now_s, age = int(time.time()), body.output_expires_after
    batch = Batch(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now_s,
        expires_at=now_s + WINDOW_S,
        model=service.own_names[0],
        metadata=body.metadata,
    )
    outputs, output_age_s = (new_id("file-"), new_id("file-")), None if age is None else age.seconds
    stored = Stored(owner=owner, about=batch, outputs=outputs, output_age_s=output_age_s)
    await asyncio.to_thread(folder.put, stored)
    batches_of(service).begin(stored, batch)
    return _described(batch)


async def stored_batch(service: Service, http: HttpRequest) -> Response:
    """Return a batch as it is now; POST cancels it. Raises what errors.py maps."""
    batches = batches_of(service)
    batch = batches.folder.get(note_of(http).client.salt, str(http.path_params["batch_id"]), Batch)
    if http.method == "POST":
        await batches.cancel(batch)
    return _described(batch)


def _described(batch: Batch) -> Response:
    return Response(msgspec.json.encode(batch), media_type="application/json")


class Batches:
    """Runs what is in the folder: a key's batches one after the other, in turn with other keys' line by line."""

    def __init__(self, app: Starlette, service: Service, folder: Folder) -> None:
        self.folder = folder
        self._app, self._service = app, service
        self._num_at_once = max(1, service.info.max_num_seqs // 2)
        self._gate = asyncio.Semaphore(self._num_at_once)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    def start(self) -> None:
        """Run what an earlier server has left."""
        for stored, batch in self.folder.unfinished():
            self.begin(stored, batch)

    def begin(self, stored: Stored, batch: Batch) -> None:
        """Run a batch in the background."""
        task = self._running[batch.id] = asyncio.create_task(self._run(stored, batch))
        task.add_done_callback(lambda _: self._running.pop(batch.id))

    async def cancel(self, batch: Batch) -> None:
        """End a batch; what it has answered stays. Raises RequestError for one that has ended."""
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise RequestError(f"Cannot cancel a batch with status '{batch.status}'.", code="batch_has_ended")
        for stored, unfinished in self.folder.unfinished():
            if unfinished is batch and batch.status != "cancelling":
                batch.status, batch.cancelling_at = "cancelling", int(time.time())
                self._running[batch.id].cancel()
                await asyncio.to_thread(self.folder.put, stored)

    async def close(self) -> None:
        """Stop; what is open is done again by the next server. Idempotent."""
        self._closing = True
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self.folder.close()

    async def _run(self, stored: Stored, batch: Batch) -> None:
        """Run a batch to its end; anew from where it is when it is cancelled, its time is over or the disk was full."""
        task, wait_s = asyncio.current_task(), 0.0
        assert task is not None
        while batch.status not in ENDED:
            try:
                await asyncio.sleep(wait_s)
                async with self._turns[stored.owner]:
                    await self._go_on(stored, batch)
            except asyncio.CancelledError:
                if batch.status != "cancelling" or self._closing:
                    raise
                task.uncancel()
                wait_s = 0.0
            except Exception as error:
                log.exception("%s stopped", batch.id)
                wait_s = AGAIN_S
                if isinstance(error, FileNotFoundError) or not isinstance(error, OSError):
                    batch.errors = Problems([Problem(code="internal_error", message="the log has the details")])
                    await self._now(stored, batch, "failed")

    async def _go_on(self, stored: Stored, batch: Batch) -> None:
        """Check a batch's lines, do those that are left, say what came of them."""
        path = self.folder.path(batch.input_file_id)
        most = self._service.settings.max_body_bytes
        work = await asyncio.to_thread(Work.read, path, most, batch.endpoint, batch.id)
        if batch.status == "validating":
            if problems := _problems(work):
                batch.errors = Problems(problems)
                await self._now(stored, batch, "failed")
                return
            await self._now(stored, batch, "in_progress")
        counts = batch.request_counts
        counts.total = work.num_left
        with ExitStack() as stack:
            journals = [stack.enter_context(closing(Journal(self.folder.path(name)))) for name in stored.outputs]
            batch.usage = journals[0].usage  # what fails has none
            for journal in journals:
                work.skip(journal.keys)
            counts.completed, counts.failed = (len(journal.keys) for journal in journals)
            ended = "cancelled" if batch.status == "cancelling" else "completed"
            if time.time() >= batch.expires_at and work.num_left:
                ended = "expired"
            if ended != "completed":
                await _give_up(work, batch, journals[1], f"batch_{ended}")
            elif not await self._run_lines(stored, batch, work, journals):
                return  # some may be written, but not noted
        if ended == "completed":
            await self._now(stored, batch, "finalizing")
        batch.output_file_id, batch.error_file_id = [await self._publish(stored, batch, i) for i in range(2)]
        await self._now(stored, batch, ended)

    async def _run_lines(self, stored: Stored, batch: Batch, work: Work, journals: list[Journal]) -> bool:
        """Do the lines that are left; False where the time is over before."""

        async def write(result: Result) -> None:
            await journals[not result.is_ok].add(result)

        def report(result: Result, note: RequestNote) -> None:
            batch.request_counts.completed += result.is_ok
            batch.request_counts.failed += not result.is_ok
            batch.usage.add(result)

        client = self._service.keys.background_of(stored.owner)
        time_left = asyncio.timeout(batch.expires_at - time.time())
        try:
            async with time_left:
                await run_lines(self._app, work, client, self._gate, self._num_at_once, write, report)
        except TimeoutError:
            if not time_left.expired():
                raise
            return False
        return True

    async def _publish(self, stored: Stored, batch: Batch, index: int) -> str | None:
        """Make a file of what was written; None for nothing."""
        name, path = stored.outputs[index], self.folder.path(stored.outputs[index])
        if not (num_bytes := path.stat().st_size):
            path.unlink()
            return None
        now_s = int(time.time())
        file = StoredFile(
            id=name,
            bytes=num_bytes,
            created_at=now_s,
            filename=f"{batch.id}_{('output', 'error')[index]}.jsonl",
            purpose="batch_output",
            expires_at=None if stored.output_age_s is None else now_s + stored.output_age_s,
        )
        await asyncio.to_thread(self.folder.put, Stored(owner=stored.owner, about=file))
        return name

    async def _now(self, stored: Stored, batch: Batch, status: str) -> None:
        """Say, and keep, how far a batch is."""
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        await asyncio.to_thread(self.folder.put, stored)


def _problems(work: Work) -> list[Problem]:
    """Return why a batch cannot begin."""
    if not 0 < work.num_left <= MAX_LINES:
        return [Problem(code="invalid_size", message=f"a batch has 1 to {MAX_LINES} lines, this one {work.num_left}")]
    return sorted(work.problems + work.duplicates, key=lambda problem: problem.line or 0)[:MAX_TOLD]


async def _give_up(work: Work, batch: Batch, journal: Journal, code: str) -> None:
    """Write of all lines that are left why they were not answered."""
    error, left = Problem(code=code, message=f"this line did not run: {code}"), work.left()
    while lines := [line for _, line in islice(left, 1000)]:
        await journal.add(*(Result(custom_id=line.custom_id, error=error) for line in lines if isinstance(line, Line)))
        batch.request_counts.failed += len(lines)
