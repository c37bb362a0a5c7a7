"""Runs the lines of a batch through the app's own endpoints: what HTTP does with a request is what happens here."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Raw
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from ridgeline.server.batch.lines import Line, LineResponse, Problem, Result, Work
from ridgeline.server.clients import Client
from ridgeline.server.service import RequestNote, Service, new_request_id

SHARE = 0.5  # of what a key may use in a minute, which is left to its other requests
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0  # before a line is tried again that met an engine that was down
Write = Callable[[Result], Awaitable[None]]
Report = Callable[[Result, RequestNote], None]


async def run_lines(
    app: Starlette, work: Work, client: Client, gate: asyncio.Semaphore, num_at_once: int, write: Write, report: Report
) -> None:
    """Do what is left of `work`, at most `num_at_once` lines at a time and each within `gate`; cancelling aborts them.

    `report` hears of each result that is written. Raises what `write` does.
    """
    left = work.left()

    async def do() -> None:
        for index, line in left:
            note = RequestNote(new_request_id(), client=client)
            await _allowed(client)
            async with gate:
                result = await _result(app, line, note, work.result_id(index))
            await write(result)
            work.done_N[index] = True
            report(result, note)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_at_once):
                tasks.create_task(do())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _allowed(client: Client) -> None:
    """Count a line as a request of its client's, once that may have one."""
    while True:
        try:
            return client.begin(SHARE)
        except HTTPException as refused:
            await asyncio.sleep(int((refused.headers or {})["Retry-After"]))


async def _result(app: Starlette, line: Line | Problem, note: RequestNote, name: str) -> Result:
    """Return what comes of a line; while the engine is down, it waits."""
    if isinstance(line, Problem):
        return Result(id=name, custom_id=None, error=line)
    note.line, wait_s = line.custom_id, FIRST_WAIT_S
    while True:
        status, content = await _post(app, line, note)
        if status != 503:
            response = LineResponse(status_code=status, request_id=note.request_id, body=Raw(content))
            return Result(id=name, custom_id=line.custom_id, response=response)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


async def _post(app: Starlette, line: Line, note: RequestNote) -> tuple[int, bytes]:
    """Return the status and body of the endpoint's response."""
    service = app.state.service
    assert isinstance(service, Service)
    status, content, arrived = 500, bytearray(), False

    async def receive() -> dict[str, Any]:
        nonlocal arrived
        if arrived:
            await asyncio.Event().wait()  # nobody disconnects
        arrived = True
        return {"type": "http.request", "body": bytes(line.body), "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        content.extend(message.get("body", b""))

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": line.url, "headers": headers, "query_string": b"", "app": app}
    try:
        await app.router({**scope, "state": {"note": note}}, receive, send)
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        reply = service.explain(error, note)
        return reply.status, reply.json
    finally:
        service.release(note)
        note.slots = note.queued_tokens = 0
    return status, bytes(content)
