"""The text of an output, as it comes -> its reasoning, its content and its tool calls.

One OutputReader for each output, and for a whole text too: streamed and whole cannot differ.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ridgeline.text.reasoning import ReasoningFormat
from ridgeline.text.tools.formats import ToolFormat
from ridgeline.text.tools.reader import Piece, Reader, Steps

TAIL_BYTES = 64  # more than any marker has


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Says what outputs of a prompt may hold: reasoning, which the prompt may have begun, and calls of `names`."""

    calls: ToolFormat | None = None
    names: Collection[str] = ()
    reasoning: ReasoningFormat | None = None
    is_open: bool = False
    leads: bool = False  # reasoning is only where the output begins: a grammar says what follows

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that the output must keep, even where they are special tokens."""
        calls = () if self.calls is None else (*self.calls.begin, self.calls.end, *self.calls.section)
        return calls if self.reasoning is None else (*calls, self.reasoning.begin, self.reasoning.end)


class OutputReader(Reader):
    """Takes the text of one output in pieces of any size."""

    def __init__(self, form: OutputFormat) -> None:
        super().__init__(form.names if form.calls is not None and form.calls.bare else None)
        self._form = form
        self._begin = () if form.calls is None else form.calls.begin
        others = () if form.calls is None else form.calls.section
        self._opens = (
            *self._begin,
            *others,
            *(() if form.reasoning is None or form.leads else (form.reasoning.begin,)),
        )
        self._steps = None if form.calls is None and form.reasoning is None else self._output()
        if self._steps is not None:
            next(self._steps)

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        """Return what is certain with this text; `last`: nothing follows."""
        if self._steps is None:
            return [Piece("content", text)] if text else []
        for char in text:
            self._steps.send(char)
        with suppress(StopIteration):
            while last:
                self._steps.send("")  # every format returns at the end
        return self.take()

    def _output(self) -> Steps[None]:
        calls, reasoning = self._form.calls, self._form.reasoning
        marker = (yield from self._reasoning(reasoning)) if reasoning is not None and self._form.is_open else ""
        if reasoning is not None and self._form.leads and not self._form.is_open:
            yield from self.attempt(self._leading(reasoning))
        yield from self._bare_call()
        while marker := marker or (yield from self.until(self._opens, self.content)):
            if reasoning is not None and marker == reasoning.begin:
                marker = yield from self._reasoning(reasoning)
                yield from self._bare_call()
                continue
            if calls is not None and marker in calls.begin:
                is_call = yield from self.attempt(calls.read(self), marker)
                marker = (yield from self.until((calls.end, *self._opens), str)) if is_call and calls.end else ""
                if not is_call:
                    continue
            if calls is not None and marker in ("", calls.end, *calls.section):
                marker = ""
                yield from self.skip_space()

    def _leading(self, reasoning: ReasoningFormat) -> Steps[None]:
        """Read reasoning that the output begins with. Raises BrokenCallError where it does not."""
        yield from self.expect(reasoning.begin)
        self._unsure = None
        yield from self._reasoning(reasoning)

    def _reasoning(self, reasoning: ReasoningFormat) -> Steps[str]:
        """Read reasoning up to its end, which gives "", or up to the marker of a call, which ends it too."""
        yield from self.skip_space()
        marker = yield from self.until((reasoning.end, *self._begin), self.reasoning)
        if marker != reasoning.end:
            return marker
        yield from self.skip_space()
        return ""

    def _bare_call(self) -> Steps[None]:
        """Read a call without a marker, where content begins and the format has such."""
        calls = self._form.calls
        if calls is not None and calls.bare and (yield from self.skip_space()) in ("{", "["):
            yield from self.attempt(calls.read(self))


class Step(NamedTuple):
    """A block begins, gets more text, or ends with all of it; a call begins with its name."""

    what: Literal["begin", "more", "end"]
    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call_id: str = ""


class BlockReader:
    """Takes the text of one output in pieces of any size. One block is open at a time, and only a call may be empty."""

    def __init__(self, form: OutputFormat) -> None:
        self._reader = OutputReader(form)
        self._kind: Literal["content", "reasoning", "call"] | None = None
        self._texts: list[str] = []

    def feed(self, text: str, *, last: bool) -> Iterator[Step]:
        """Yield what is certain with this text; `last`: nothing follows."""
        for piece in self._reader.feed(text, last=last):
            kind = "call" if piece.kind == "arguments" else piece.kind
            if piece.kind == "call" or kind != self._kind:
                yield from self._end()
                self._kind = kind
                yield Step("begin", kind, piece.text if kind == "call" else "", piece.call_id)
            if piece.kind != "call":
                self._texts.append(piece.text)
                yield Step("more", kind, piece.text)
        if last:
            yield from self._end()

    def _end(self) -> Iterator[Step]:
        if self._kind is not None:
            yield Step("end", self._kind, "".join(self._texts))
        self._kind, self._texts = None, []


class ReasoningTokens:
    """Counts the tokens of one output that are reasoning, up to and with the markers that end it."""

    def __init__(self, form: OutputFormat) -> None:
        self._begins: list[bytes] = [] if form.reasoning is None else [form.reasoning.begin.encode()]
        calls = () if form.calls is None else form.calls.begin
        self._ends = [] if form.reasoning is None else [marker.encode() for marker in (form.reasoning.end, *calls)]
        self._is_open, self._tail = form.is_open, b""

    def count(self, tokens: Iterable[bytes]) -> int:
        """Return how many of the next tokens are reasoning."""
        counted = 0
        for token in tokens if self._begins else ():
            counted += self._is_open
            self._tail = (self._tail + token)[-TAIL_BYTES:]
            if any(marker in self._tail for marker in (self._ends if self._is_open else self._begins)):
                self._is_open, self._tail = not self._is_open, b""
        return counted
