"""Read an output one character at a time: what a model wrote becomes content, reasoning and tool calls.

A format is a generator that is sent the next character, "" behind the last. So pieces of any size give what the whole
text gives, wherever it is cut. No text makes it raise.
"""

import json
import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[None, str, T]
Kind = Literal["content", "reasoning", "call", "arguments"]
Write = Callable[[str], object]


class Piece(NamedTuple):
    """A part of an output: text of a kind, or the name of call number `call`, which begins it."""

    kind: Kind
    text: str
    call: int = 0
    call_id: str = ""


class BrokenCallError(Exception):
    """Raised by formats for a text that is no call."""


class Reader:
    """Gives formats characters, and takes the pieces that they make of them. `num_calls` have begun."""

    def __init__(self, names: Collection[str] | None) -> None:
        """Take calls of `names` alone, unless it is None."""
        self.num_calls = 0
        self._names = names
        self._again: deque[str] = deque()
        self._pieces: list[tuple[Piece, list[str]]] = []
        self._marker = ""  # the last one, with the space before it
        self._unsure: list[str] | None = None  # text of a call whose name is not known: content, if it turns out broken

    def next(self) -> Steps[str]:
        """Return the next character."""
        char = self._again.popleft() if self._again else (yield)
        if self._unsure is not None:
            self._unsure.append(char)
        return char

    def unread(self, char: str) -> None:
        """Give a character back, to be read next."""
        self._again.appendleft(char)
        if self._unsure is not None:
            self._unsure.pop()

    def skip_space(self) -> Steps[str]:
        """Pass over white space; return the character behind it, which is read next."""
        while (char := (yield from self.next())).isspace():
            pass
        self.unread(char)
        return char

    def until(self, markers: Sequence[str], write: Write) -> Steps[str]:
        """Write the text up to the first of `markers`, without space before it; return the marker, "" at the end."""
        beginnings = _beginnings(tuple(markers))
        space, held = "", ""
        while char := (yield from self.next()):
            if not held and char.isspace():
                space += char
                continue
            held += char
            while held and held not in beginnings:
                write(space + held[0])
                rest = held[1:]
                held = rest.lstrip()
                space = rest[: len(rest) - len(held)]
            if held in markers:
                self._marker = space + held
                return held
        write(space + held)
        return ""

    def text_until(self, *markers: str) -> Steps[str]:
        """Return the text up to one of `markers`. Raises BrokenCallError where none comes."""
        text: list[str] = []
        if not (yield from self.until(markers, text.append)):
            raise BrokenCallError
        return "".join(text).strip()

    def expect(self, text: str) -> Steps[None]:
        """Pass over white space, then `text`. Raises BrokenCallError for anything else."""
        yield from self.skip_space()
        for wanted in text:
            if (yield from self.next()) != wanted:
                raise BrokenCallError

    def string(self) -> Steps[str]:
        """Return the value of a JSON string. Raises BrokenCallError."""
        written: list[str] = []
        yield from self.value(written.append)
        try:
            text = json.loads("".join(written), strict=False)
        except (ValueError, RecursionError) as error:
            raise BrokenCallError from error
        if not isinstance(text, str):
            raise BrokenCallError
        return text

    def value(self, write: Write) -> Steps[None]:
        """Write one JSON value as it is spelled. Raises BrokenCallError where it does not end."""
        yield from self.skip_space()
        depth, quoted, escaped = 0, False, False
        while char := (yield from self.next()):
            if not depth and not quoted and (char.isspace() or char in ",:}]"):
                self.unread(char)  # behind a number or a word
                return
            write(char)
            if quoted:
                quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
            else:
                quoted = char == '"'
                depth += (char in "{[") - (char in "}]")
            if not depth and not quoted and char in '"}]':
                return
        raise BrokenCallError

    def content(self, text: str) -> None:
        self._add(Piece("content", text))

    def reasoning(self, text: str) -> None:
        self._add(Piece("reasoning", text))

    def call(self, name: str) -> None:
        """Add the start of a call; its arguments follow. Raises BrokenCallError for what cannot be a name."""
        if not name or (self._names is not None and name not in self._names):
            raise BrokenCallError
        self._unsure = None
        call_id = uuid.uuid4().hex[:9]  # nine letters and digits, which Mistral's templates insist on
        self._add(Piece("call", name, self.num_calls, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the JSON text of the last call's arguments."""
        self._add(Piece("arguments", text, self.num_calls - 1))

    def attempt(self, steps: Steps[None], marker: str = "") -> Steps[bool]:
        """Read a call, maybe behind a marker; tell whether it was one. If not, its text is content."""
        before = self.num_calls
        self._unsure = [self._marker] if marker else []
        try:
            yield from steps
        except BrokenCallError:
            self.content("".join(self._unsure or ()))
        self._unsure = None
        return self.num_calls > before

    def take(self) -> list[Piece]:
        """Return the pieces since the last call of this, neighbours of one kind joined."""
        pieces = [piece._replace(text="".join(texts)) for piece, texts in self._pieces]
        self._pieces.clear()
        return pieces

    def _add(self, piece: Piece) -> None:
        if self._pieces and piece.kind != "call" and self._pieces[-1][0][::2] == piece[::2]:
            self._pieces[-1][1].append(piece.text)
        elif piece.text:
            self._pieces.append((piece, [piece.text]))


@cache
def _beginnings(markers: tuple[str, ...]) -> frozenset[str]:
    """Return what may become one of the markers."""
    return frozenset(marker[:length] for marker in markers for length in range(1, len(marker) + 1))
