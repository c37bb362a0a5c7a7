"""Parse server-sent events as bytes arrive (WHATWG HTML, section 9.2). Called by bench/client.py."""

from dataclasses import dataclass

MAX_EVENT_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class SSEEvent:
    """One dispatched event: its name ("message" when none was given) and its data lines joined by newlines."""

    name: str
    data: str


class SSEParser:
    """Bytes in, complete events out; where the network cuts the bytes makes no difference.

    Lines end with LF, CRLF or CR. As the standard asks, an event without data is dropped, and so is one that
    the end of the stream cuts off. Raises ValueError from `feed` when an event grows past MAX_EVENT_BYTES.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # the unfinished last line
        self._after_cr = False  # a line ended with CR: an LF that comes next belongs to it
        self._at_start = True  # nothing parsed yet: a byte order mark may come
        self._name = ""
        self._data: list[str] = []
        self._event_bytes = 0

    def feed(self, chunk: bytes) -> list[SSEEvent]:
        """Return the events that `chunk` completes, in order."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        self._line += chunk
        events: list[SSEEvent] = []
        lines = self._line.splitlines(keepends=True)
        self._line = bytearray() if lines[-1].endswith((b"\r", b"\n")) else lines.pop()
        for line in lines:
            event = self._take(line.rstrip(b"\r\n"))
            if event is not None:
                events.append(event)
        if self._event_bytes + len(self._line) > MAX_EVENT_BYTES:
            raise ValueError(f"a server-sent event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    def _take(self, line: bytes | bytearray) -> SSEEvent | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._dispatch()
        self._event_bytes += len(line)
        field, _, value = line.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None

    def _dispatch(self) -> SSEEvent | None:
        event = SSEEvent(self._name or "message", "\n".join(self._data)) if self._data else None
        self._name, self._data, self._event_bytes = "", [], 0
        return event
