"""Fuzzers of what a server reads: HTTP, the bodies of its endpoints, and frames of the engine's process."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from bad_inputs import GOOD, RICH
from fake_engine import FakeEngine, fake_info
from tests.fuzz.harness import Finding, Target, pieces, refusing
from uvicorn import Config
from uvicorn.server import ServerState

from ridgeline.core.errors import RequestError
from ridgeline.core.params import SamplingParams
from ridgeline.engine.client import EngineInfo
from ridgeline.engine.intake import Intake
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.process import wire
from ridgeline.server.app import create_app
from ridgeline.server.settings import ServerSettings
from ridgeline.server.transport import Connection, Limiter
from ridgeline.weights.folder import ModelFolder

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>\n{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}</think>"
)
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
    b'name="file"; filename="a.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n{}\n\r\n--b--\r\n'
)
REQUESTS = (
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD /version HTTP/1.0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n"
    b'{"prompt": "aa"}',
    b"POST /v1/completions?x=%00#f HTTP/1.1\r\nHost: [::1]:1\r\ncontent-type: application/json; charset=utf-16\r\n"
    b'Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n5;a=b\r\n{"pro\r\nB\r\nmpt": "aa"}\r\n'
    b"0\r\nX: y\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Request-Id: a\r\n\r\n",
    b"POST http://b/v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\r\nContent-Type: multipart/form-data; "
    b"boundary=b\r\nContent-Length: %d\r\n\r\n%s" % (len(FORM), FORM),
)
HEADERS = (
    b"Content-Length: ",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: b\r\n",
    b"HTTP/1.1",
    b"Cookie: ",
    b" \r\n\t",
    b"0\r\n\r\n",
)


class Server:
    """The app over an engine that only counts, on an event loop that runs while an input is looked at."""

    def __init__(self, folder: Path) -> None:
        (folder / "template.jinja").write_text(TEMPLATE)
        self.loop = asyncio.new_event_loop()
        self.problems: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.problems.append(context))
        tokenizer = ModelFolder.open("python-1m").tokenizer()
        assert tokenizer is not None
        engine = FakeEngine(fake_info(vocab_size=tokenizer.vocab_size, max_model_len=256), tokenizer, room=10**9)
        engine.start()
        settings = ServerSettings(
            files=str(folder / "files"),
            max_file_bytes=1000,
            max_files_bytes=10_000,
            max_stored_bytes=10_000,
            chat_template=str(folder / "template.jinja"),
        )
        self.app = create_app(engine, tokenizer, settings)
        self.service = self.app.state.service

    def close(self) -> None:
        """End the event loop, and let go of the folder."""
        self.loop.run_until_complete(self.service.drain())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work on the event loop. Raises Finding for one that does not end, and for what nobody handled."""
        try:
            self.loop.run_until_complete(asyncio.wait_for(work, 20))
        except TimeoutError:
            raise Finding("no end within 20 s") from None
        if self.problems:
            raise Finding(f"nobody handled {self.problems.pop()}")
        if self.service.num_slots or self.service.num_queued_tokens:
            raise Finding("slots are still taken")


def bodies(folder: Path) -> Target:
    """Bodies of all endpoints: none is an error of the server's own, each refusal has the four keys."""
    server = Server(folder)
    paths = [*(path for path in GOOD if path != "/explain/plan"), "/v1/files"]

    async def ask(path: str, body: bytes, replied: Callable[[int, bytes], None]) -> None:
        status, content, arrived = 0, bytearray(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if arrived.is_set():
                await asyncio.Event().wait()
            arrived.set()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            content.extend(message.get("body", b""))

        media_type = b"multipart/form-data; boundary=b" if path == "/v1/files" else b"application/json"
        about = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        about |= {"headers": [(b"content-type", media_type), (b"host", b"a")], "client": ("a", 1), "scheme": "http"}
        await server.app({**about, "http_version": "1.1", "server": ("a", 1), "root_path": ""}, receive, send)
        replied(status, bytes(content))

    def run(data: bytes) -> bool:
        replies: list[tuple[int, bytes]] = []
        server.run(ask(paths[data[0] % len(paths)], data[1:], lambda *reply: replies.append(reply)))
        ((status, content),) = replies
        if status >= 500 or b"event: error" in content:
            raise Finding(f"{status} {content[-500:]!r}")
        if status >= 400:
            body = json.loads(content)["error"]
            if not body["message"] or not {"type", "message"} <= body.keys():
                raise Finding(f"an error that says nothing: {body}")
        return status < 400

    rich = [(path, {**GOOD[path], **more}) for path, more in RICH.items() if path in paths]
    seeds = [
        bytes([paths.index(path)]) + json.dumps(body).encode() for path, body in (*GOOD.items(), *rich) if path in paths
    ]
    seeds.append(bytes([len(paths) - 1]) + FORM)
    words = {json.dumps(key).encode() for _, body in rich for key in body} | {b'"n": 3', b'"stream": true', b"1e400"}
    return Target(run, seeds, sorted(words), close=server.close)


class Pipe(asyncio.Transport):
    """A connection without a network."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.sent, self.is_closed = bytearray(), False

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """What is sent has been sent."""

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        """What comes is little."""

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0


def http(folder: Path) -> Target:
    """Connections in pieces of any size: every reply is HTTP, and none but 503 and 505 is a 5xx."""
    server = Server(folder)
    config, state = Config(server.app, ws="none", log_config=None, access_log=False), ServerState()
    config.load()
    limiter = Limiter(server.service)

    async def connect(data: bytes, pipe: Pipe) -> None:
        connection = Connection(config, state, {}, limiter)
        connection.connection_made(pipe)
        for piece in pieces(data[1:], 1 + data[0]):
            if not pipe.is_closed:
                connection.data_received(piece)
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        if state.tasks:
            await asyncio.wait(state.tasks)
        if state.connections:
            raise Finding("a connection stays")

    def run(data: bytes) -> bool:
        pipe = Pipe()
        server.run(connect(data, pipe))
        found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", pipe.sent)]
        if pipe.sent and not pipe.sent.startswith(b"HTTP/1.1 "):
            raise Finding(f"no HTTP: {bytes(pipe.sent[:200])!r}")
        if any(status >= 500 and status not in (503, 505) for status in found):
            raise Finding(f"{bytes(pipe.sent[-500:])!r}")
        return any(status < 400 for status in found)

    seeds = [bytes([size]) + request for request in REQUESTS for size in (0, 30, 255)]
    return Target(run, seeds, HEADERS, close=server.close)


def frames(folder: Path) -> Target:
    """The stream between a server and its engine's process, cut anywhere."""
    info: EngineInfo = fake_info(max_model_len=64)
    params = SamplingParams(max_tokens=4, logit_bias={1: 2.0})
    request = Intake(info, None, lambda: 0.0).request([1, 2], params, request_id="r")
    messages = [
        *(wire.Abort("a"), wire.Hold("a", True), wire.Failed("ConfigError", "no")),
        *(wire.Submit([request]), wire.Outputs([OutputDelta("a", 0)])),
    ]

    def run(data: bytes) -> bool:
        with refusing(ValueError) as refused:
            whole, cut = wire.Frames(), wire.Frames()
            found = whole.feed(data[1:])
            if found != [frame for piece in pieces(data[1:], 1 + data[0]) for frame in cut.feed(piece)]:
                raise Finding("frames depend on how they come")
        num_read = 0
        for frame in found if not refused else ():
            for decode in (wire.decode_to_engine, wire.decode_from_engine):
                with refusing(ValueError, RequestError):
                    decode(frame)
                    num_read += 1
        return num_read > 0

    return Target(
        run, [b"\0" + wire.encode(message) * 2 for message in messages], (b"\xc0", b"\xdd\xff\xff\xff\xff", b"\x91")
    )
