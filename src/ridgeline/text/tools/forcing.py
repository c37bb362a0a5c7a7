"""The grammar of an output that must be tool calls: Lark, for llguidance."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import RequestError
from ridgeline.text.grammar import WHITESPACE, checked_schema
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tools.formats import ToolFormat

_MARKER = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")


def forced_calls(
    form: ToolFormat, tools: Mapping[str, tuple[Mapping[str, Any], bool]], tokenizer: Tokenizer, *, parallel: bool
) -> str:
    """Return the grammar of calls of `tools`: the schemas of their arguments by name, and whether they are strict.

    Unknown keywords of a schema that is not strict are left out. Raises RequestError, naming the tool, for one that
    cannot be followed.
    """
    rules: list[str] = []
    for name, (schema, strict) in tools.items():
        options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}
        try:
            arguments = json.dumps({**checked_schema(schema), "x-guidance": options})
        except RequestError as error:
            raise RequestError(f"tools: parameters of {name!r}: {error}", param="tools", code=error.code) from error
        before, after = form.call.replace("$NAME", name).split("$ARGS")
        rules.append(f"{_spelled(before, tokenizer)} %json {arguments} {_spelled(after, tokenizer)}")
    again = f"({_spelled(form.separator, tokenizer)} call)*" if parallel and form.separator is not None else ""
    start = f"{_spelled(form.opening, tokenizer)} call {again} {_spelled(form.closing, tokenizer)}"
    return f"start: {start}\ncall: {' | '.join(rules)}"


def _spelled(text: str, tokenizer: Tokenizer) -> str:
    """Return a text in Lark; a marker that is one token is that token, which no text stands for."""
    parts: list[str] = []
    for part in _MARKER.split(text):
        token_id = tokenizer.token_id(part) if _MARKER.fullmatch(part) else None
        quoted = json.dumps(part, ensure_ascii=False) if part else ""
        parts.append(quoted if token_id is None else f"<[{token_id}]>")
    return " ".join(parts)
