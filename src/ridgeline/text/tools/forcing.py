"""The grammars of outputs with tool calls or reasoning: Lark, for llguidance."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from ridgeline.core.errors import RequestError
from ridgeline.text.grammar import WHITESPACE
from ridgeline.text.json_schema import followed_schema
from ridgeline.text.reasoning import ReasoningFormat
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tools.formats import ToolFormat

Tools = Mapping[str, tuple[Mapping[str, Any], bool]]  # by name, the schemas of arguments, and whether they are strict
_MARKER = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")


def forced_calls(form: ToolFormat, tools: Tools, tokenizer: Tokenizer, *, parallel: bool) -> str:
    """Return the grammar of calls of `tools`.

    Unknown keywords of a schema that is not strict are left out. Raises RequestError, naming the tool, for one that
    cannot be followed.
    """
    start = _calls(form, form.opening, form.call, tools, tokenizer, parallel=parallel)
    return f"start: {start}"


def calls_among_text(form: ToolFormat, tools: Tools, tokenizer: Tokenizer, *, parallel: bool) -> str:
    """Return the grammar of text that may hold calls of `tools`: each marker begins one. Raises as `forced_calls`."""
    if form.final:
        calls = _calls(form, form.opening, form.call, tools, tokenizer, parallel=parallel)
        return f"start: {_spelled(form.final, tokenizer)} TEXT | calls\nTEXT: /(?s:.*)/\ncalls: {calls}"
    if (found := _MARKER.match(form.opening or form.call)) is None:  # the output may begin with calls
        calls = _calls(form, form.opening, form.call, tools, tokenizer, parallel=parallel)
        begin = "".join(f"{_marker(marker, tokenizer)}? " for marker in form.begin)
        plain = _without("/\\s*([^\\s{\\[](?s:.*))?/", form.begin)
        return f"start: PLAIN | {begin}calls\nPLAIN: {plain}\ncalls: {calls}"
    marker = found[0]
    opening, call = form.opening.removeprefix(marker), form.call if form.opening else form.call.removeprefix(marker)
    calls = _calls(form, opening, call, tools, tokenizer, parallel=parallel and bool(form.opening))
    text = f"TEXT: {_without('/(?s:.*)/', {marker, *form.begin})}"
    return f"start: (head calls){'*' if parallel else '?'} TEXT\n{_until(marker, tokenizer)}\n{text}\ncalls: {calls}"


def reasoning_before(
    reasoning: ReasoningFormat, calls: ToolFormat | None, tokenizer: Tokenizer, *, is_open: bool
) -> str:
    """Return the grammar of reasoning, without calls, and @output behind it; there may be none, unless it `is_open`."""
    begin = "head" if is_open else f"({_marker(reasoning.begin, tokenizer)} head)?"
    text = _without("/(?s:.*)/", {reasoning.end, *(() if calls is None else calls.begin)})
    return f"start: {begin} SPACE @output\n{_until(reasoning.end, tokenizer)}\nTEXT: {text}\nSPACE: /\\s{{0,4}}/"


def thoughts_before(form: ToolFormat, tokenizer: Tokenizer, *, final: bool) -> str:
    """Return the grammar of messages of reasoning, and @output behind them: `final` content, or a whole message."""
    before, after = form.thought.split("$TEXT")
    marker = next(iter(_MARKER.findall(after)))
    thought = f"{_spelled(before, tokenizer)} head {_spelled(after.removeprefix(marker), tokenizer)}"
    begin = _spelled(form.final, tokenizer) if final else ""
    text = f"TEXT: {_without('/(?s:.*)/', {marker})}"
    return f"start: thought* {begin} @output\nthought: {thought}\n{_until(marker, tokenizer)}\n{text}"


def _calls(form: ToolFormat, opening: str, call: str, tools: Tools, tokenizer: Tokenizer, *, parallel: bool) -> str:
    """Return the body of a rule for calls, with the rule `call` behind it."""
    rules: list[str] = []
    for name, (schema, strict) in tools.items():
        options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}
        try:
            arguments = json.dumps({**followed_schema(schema), "x-guidance": options})
        except RequestError as error:
            raise RequestError(
                f"tools: parameters of {name!r}: {error}", param="tools", code="unsupported_schema"
            ) from error
        before, after = call.replace("$NAME", name).split("$ARGS")
        rules.append(f"{_spelled(before, tokenizer)} %json {arguments} {_spelled(after, tokenizer)}")
    again = f"({_spelled(form.separator, tokenizer)} call)*" if parallel and form.separator is not None else ""
    body = f"{_spelled(opening, tokenizer)} call {again} {_spelled(form.closing, tokenizer)}"
    return f"{body}\ncall: {' | '.join(rules)}"


def _until(marker: str, tokenizer: Tokenizer) -> str:
    """Return the rule `head`: text up to a marker, which ends it."""
    spelled = _marker(marker, tokenizer)
    return f"head{'[lazy]' if spelled.startswith(chr(34)) else ''}: TEXT {spelled}"


def _without(pattern: str, markers: Collection[str]) -> str:
    """Return a terminal that matches `pattern` where no marker is in it."""
    escaped = (re.escape(marker).replace("/", "\\/") for marker in sorted(markers))
    return pattern + "".join(f" & ~/(?s:.*){each}(?s:.*)/" for each in escaped)


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """Return a marker in Lark; text cannot hold one that is a special token, nor a token in angle brackets."""
    token_id = tokenizer.token_id(text)
    is_apart = token_id is not None and (token_id in tokenizer.special_ids or text.startswith("<"))
    return f"<[{token_id}]>" if is_apart else json.dumps(text, ensure_ascii=False)


def _spelled(text: str, tokenizer: Tokenizer) -> str:
    """Return a text in Lark; a marker that is one token is that token, which no text stands for."""
    parts: list[str] = []
    for part in _MARKER.split(text):
        token_id = tokenizer.token_id(part) if _MARKER.fullmatch(part) else None
        quoted = json.dumps(part, ensure_ascii=False) if part else ""
        parts.append(quoted if token_id is None else f"<[{token_id}]>")
    return " ".join(parts)
