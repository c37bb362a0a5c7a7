"""How models write tool calls: the table of formats, formats.toml, with what reads them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.core.files import read_toml
from ridgeline.text.tools.reader import BrokenCallError, Reader, Steps

_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.:-]+)")
_MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_ARGUMENTS = ("arguments", "parameters")
INSTRUCTIONS = """You can call these functions:
$TOOLS
To call one, reply with nothing but {"name": its name, "parameters": a JSON object}."""  # where a template has none


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Describe a format. `seen`: all of these stand in the chat templates of its models. `aliases` are vLLM's names.

    `read` reads what follows a marker of `begin`; with `bare` also the beginning of an output, with `always` also where
    there are no tools. `end` stands behind a call; `section` are markers that mean nothing more. A grammar forces
    `opening`, `call` with $NAME and $ARGS, more calls behind `separator` (None: one alone), `closing`. Where all is in
    messages, `thought` with $TEXT is one of reasoning, and `final` begins the one that has the content.
    """

    seen: Sequence[str]
    read: Callable[[Reader], Steps[None]]
    call: str
    begin: Sequence[str] = ()
    end: str = ""
    section: Sequence[str] = ()
    bare: bool = False
    always: bool = False
    opening: str = ""
    separator: str | None = None
    closing: str = ""
    thought: str = ""
    final: str = ""
    aliases: Sequence[str] = ()


def _json_call(reader: Reader) -> Steps[None]:
    """Read {"name": …, "arguments": {…}}; the keys may be in any order, and arguments are `parameters` for some."""
    name = ""
    early: list[str] = []  # arguments that come before the name
    yield from reader.expect("{")
    before = reader.num_calls
    char = ","
    while char == ",":
        key = yield from reader.string()
        yield from reader.expect(":")
        if key == "name" and not name:
            name = yield from reader.string()
        elif key in _ARGUMENTS and name and not early and reader.num_calls == before:
            reader.call(name)
            yield from reader.value(reader.arguments)
        elif key in _ARGUMENTS and not name and not early:
            yield from reader.value(early.append)
        elif key in ("id", "type", "tool_call_id"):
            yield from reader.value(str)
        else:
            raise BrokenCallError
        yield from reader.skip_space()
        char = yield from reader.next()
    if char != "}":
        raise BrokenCallError
    if reader.num_calls == before:
        reader.call(name)
        reader.arguments("".join(early) or "{}")


def _json_calls(reader: Reader) -> Steps[None]:
    """Read a JSON call, or a list of them."""
    if (char := (yield from reader.skip_space())) != "[":
        yield from _json_call(reader)
        return
    yield from reader.next()
    while char != "]":
        yield from _json_call(reader)
        yield from reader.skip_space()
        char = yield from reader.next()
        if char not in (",", "]"):
            raise BrokenCallError


def _json_sequence(reader: Reader) -> Steps[None]:
    """Read JSON calls parted by semicolons."""
    yield from _json_call(reader)
    while (yield from reader.skip_space()) == ";":
        yield from reader.next()
        yield from _json_call(reader)


def _mistral(reader: Reader) -> Steps[None]:
    """Read JSON calls (v3 to v7), or a name and JSON (from v11)."""
    if (yield from reader.skip_space()) in ("[", "{"):
        yield from _json_calls(reader)
        return
    name: list[str] = []
    if (marker := (yield from reader.until(("[ARGS]", "{"), name.append))) == "{":
        reader.unread(marker)
    reader.call("".join(name).partition("[CALL_ID]")[0].strip() if marker else "")
    yield from reader.value(reader.arguments)


def _deepseek(reader: Reader) -> Steps[None]:
    """Read a name and JSON; before V3.1 it is in a fence, behind the word function."""
    name = yield from reader.text_until("<｜tool▁sep｜>")
    if name == "function":
        name = yield from reader.text_until("```json")
    reader.call(name)
    yield from reader.value(reader.arguments)


def _harmony(reader: Reader) -> Steps[None]:
    """Read a message; its header has a channel and, if it is a call, to which function."""
    header = yield from reader.text_until("<|message|>")
    write = reader.reasoning if "analysis" in header else reader.content
    if (recipient := _RECIPIENT.search(header)) is not None:
        reader.call(recipient[1])
        write = reader.arguments
    yield from reader.until(_MESSAGE_ENDS, write)


_READERS = (_json_calls, _json_sequence, _mistral, _deepseek, _harmony)


def _formats() -> Mapping[str, ToolFormat]:
    """Read the rows of formats.toml."""
    readers = {reader.__name__.removeprefix("_"): reader for reader in _READERS}
    rows: Mapping[str, dict[str, Any]] = read_toml(__file__, "formats.toml")
    read = {name: readers[row.pop("read")] for name, row in rows.items()}
    return {name: ToolFormat(read=read[name], **row) for name, row in rows.items()}


FORMATS = _formats()


def chosen_format(name: str, template: str) -> ToolFormat | None:
    """Return the format of a name, for "auto" the one of a chat template; None for "none". Raises ConfigError."""
    if name == "auto":
        fitting = [form for form in FORMATS.values() if all(text in template for text in form.seen)]
        return max(fitting, key=lambda form: sum(map(len, form.seen)))
    named = {alias: form for own, form in FORMATS.items() for alias in (own, *form.aliases)}
    if name not in (*named, "none"):
        raise ConfigError(f"no tool call parser {name!r}; choose one of auto, none, {', '.join(sorted(named))}")
    return named.get(name)
