"""Makes bad inputs of what /openapi.json says: each field of each body, at every depth, with each value of a pool.

A value that the document does not allow must be refused. One that it allows may still be refused, for a reason that a
type cannot say, or be served.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 4
JSON = "application/json"
Document = Mapping[str, Any]
Place = tuple[str | int, ...]

POOL: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 1.5, -0.5, 1e308, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400),
    *("", "1", "a", "\x00", "\ud800", "\U0001f525\u202e\u200b", [], [1], ["a"], [None], [[]], {}, {"a": 1}, {"": {}}),
)
LONG = ("a" * 20_000, ["a"] * 5_000, [0] * 5_000, {f"k{i}": "v" for i in range(2_000)})  # where they are allowed
NO_JSON = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "01",
    "1.",
    "0x1",
    "'a'",
    "[1,]",
    '{"a" 1}',
    "undefined",
)  # numbers alone
GOOD: Mapping[str, Any] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/classify": {"input": "a"},
    "/v1/batches": {"input_file_id": "file-a", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/explain/plan": ["--workload=nothing"],
}
RICH: Mapping[str, Mapping[str, Any]] = {  # fields with something within that can be spoilt
    "/v1/completions": {"stream": True, "stream_options": {"include_usage": True}, "speculation": {"enabled": True}},
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "a"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "prediction": {"type": "content", "content": "a"},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": [{"type": "text", "text": "a"}],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
    "/v1/messages/count_tokens": {"system": [{"type": "text", "text": "a"}], "tools": [{"name": "f"}]},
    "/tokenize": {"chat_template_kwargs": {"a": 1}},
}
CONFLICTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "/v1/completions": (
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'},
        {"structured_outputs": {"regex": "a", "json": {}}},
        {"structured_outputs": {"json_object": False}},
        {"n": 3, "best_of": 2},
        {"use_beam_search": True, "stream": True},
        {"length_penalty": 2.0},
        {"use_beam_search": True, "length_penalty": "1"},
        {"n": 1, "best_of": 2, "stream": True},
        {"n": 128, "prompt": ["a"] * 128},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "prompt_logprobs": 1},
        {"stream": True, "echo": True, "logprobs": 1, "prompt_logprobs": 2},
        {"min_tokens": 2},
        {"echo": False, "max_tokens": 0},
        {"messages": []},
        {"input": "a"},
    ),
    "/v1/load_lora_adapter": (
        *({"lora_path": path} for path in ("", "/", "/dev/null", "~", "~nobody", "a" * 5_000, "a\x00b", "../" * 2_000)),
        *({"lora_name": name} for name in (" ", "\n", "python-1m")),
        {"load_inplace": True},
        {"lora_int_id": 1},
    ),
    "/v1/chat/completions": (
        {"max_tokens": 1, "max_completion_tokens": 2},
        {"top_logprobs": 2},
        {"top_logprobs": 2, "logprobs": False},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"guided_json": {}, "response_format": {"type": "json_object"}},
        {"prompt": "a"},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": "lost"}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]},
        {"functions": [{"name": "f"}], "tools": []},
        {"stream": True, "prompt_logprobs": 1},
    ),
    "/v1/responses": (
        {"previous_response_id": "resp_none"},
        {"messages": [{"role": "user", "content": "a"}], "input": None},
        {"n": 2},
        {"background": True},
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "lost"}]}},
        {"input": [{"type": "item_reference", "id": "lost"}]},
        {"tool_choice": "required"},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
        {"input": []},
        {"input": [{"type": "function_call_output", "call_id": "lost", "output": "a"}]},
        {"text": {"format": {"type": "json_schema"}}, "guided_regex": "a"},
    ),
    "/v1/messages": (
        {"messages": []},
        {"tool_choice": {"type": "tool", "name": "lost"}},
        {"tool_choice": {"type": "any"}},
        {"mcp_servers": [{"url": "a"}]},
        {"container": "a"},
        {"system": [{"type": "image"}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        {"output_config": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}},
    ),
    "/v1/responses/input_tokens": ({"input": []}, {"previous_response_id": "lost"}),
    "/v1/messages/count_tokens": ({"messages": []}, {"tool_choice": {"type": "tool", "name": "lost"}}),
    "/v1/embeddings": ({"dimensions": 0}, {"dimensions": 10**6}, {"input": []}, {"input": [[], []]}, {"prompt": "a"}),
    "/tokenize": ({"messages": []}, {"content": "a"}, {"prompt": None}, {"messages": [{"role": "user"}]}),
    "/detokenize": ({"tokens": [-1]}, {"tokens": [2**40]}, {"tokens": ["a"]}, {"prompt": "a"}),
}
NO_BODIES: tuple[bytes, ...] = (
    *(
        b"",
        b" ",
        b"null",
        b"true",
        b"1",
        b'"a"',
        b"[]",
        b"{",
        b"}",
        b"{}{}",
        b"{'a': 1}",
        b'{"a"',
        b'{"a":',
        b'{"a":1,}',
    ),
    *(
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b"\x00",
        b'{"a": "\xff"}',
        b'{"\xc0\xaf": 1}',
        b'{"a": "\xed\xa0\x80"}',
    ),
    *(b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": "\\x"}', b'{"a": "\n"}', b'{"a": NaN}', b"{" * 50_000),
    *(b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 50_000, b'{"model": ' + b"[" * 2_000 + b"]" * 2_000 + b"}"),
    *(b'{"' + b"k" * 50_000 + b'": 1}', b'{"a": ' + b"9" * 50_000 + b"}", b"<a/>", b"a=1&b=2", b"--x\r\n\r\n--x--"),
)
MEDIA_TYPES = (
    *("", "text/plain", "text/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a", "/"),
    *("application/xml", "application/json-seq", "application/vnd.api+json", "application/octet-stream", "*/*", "\xff"),
)


@dataclass(frozen=True, slots=True)
class BadInput:
    """A request; `refused`: it must be, since the document does not allow it."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": JSON})
    refused: bool = True


def bad_inputs(document: Document) -> Iterator[BadInput]:
    """Yield requests for every operation in the document, none of which is what a client should send."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            if JSON in content:
                yield from _bodies(document, path, content[JSON]["schema"])
            elif content:
                yield from _forms(path)
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "TRACE", "FOO"):
            if method.lower() not in operations:
                yield BadInput(method, path, b"{}")
        for end in ("/", "/x", "%00", "?%ff=%ff", "/..", "//", ";a=b", "/%2e%2e/etc/passwd"):
            yield BadInput("GET", path + end, refused=False)
    for name in ("lost", "..", "%2e%2e", "%00", "%ff", "a%0d%0ab: c", "%F0%9F%94%A5", "a" * 5_000, "*", "{}", "%7B%7D"):
        for path in (
            "/v1/models/{}",
            "/v1/responses/{}",
            "/v1/responses/{}/input_items",
            "/v1/{}",
            "/v1/requests/{}/explain",
        ):
            yield BadInput("GET", path.replace("{}", name))
        for path in ("/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}"):
            yield BadInput("GET", path.replace("{}", name))
        yield BadInput("DELETE", f"/v1/files/{name}")
        yield BadInput("POST", f"/v1/batches/{name}/cancel", b"{}")
        yield BadInput("DELETE", f"/v1/responses/{name}")
        yield BadInput("POST", f"/v1/responses/{name}/cancel", b"{}")
    for text in ("a", "-", "1.5", "1e9", "%00", "0x1", "9" * 5_000, "%F0%9F%94%A5"):
        for name in ("steps", "spans", "decisions"):
            yield BadInput("GET", f"/explain/steps?{name}={text}")
        for path in ("/v1/files", "/v1/batches"):
            for name in ("limit", "order", "after"):
                yield BadInput("GET", f"{path}?{name}={text}")


def _bodies(document: Document, path: str, schema: Document) -> Iterator[BadInput]:
    good = GOOD.get(path) or GOOD[path.removeprefix("/v1").removeprefix("/v2")]
    for value in (good, *({**good, name: value} for name, value in RICH.get(path, {}).items())):
        spoilt = path == "/explain/plan" or value is not good  # of a rich body, what is within the rich field alone
        for changed in _spoilt(document, schema, value, 0 if not spoilt or path == "/explain/plan" else 1):
            yield BadInput("POST", path, dumped(changed), refused=not allows(document, schema, changed))
    for conflict in CONFLICTS.get(path, ()):
        yield BadInput("POST", path, dumped({**good, **conflict}))
    for text in NO_JSON:
        for name in (*good, "n", "temperature", "seed") if isinstance(good, dict) else ():
            yield BadInput("POST", path, dumped({**good, name: "@"}).replace(b'"@"', text.encode()))
    for body in NO_BODIES:
        yield BadInput("POST", path, body)
    for media_type in MEDIA_TYPES:
        yield BadInput("POST", path, dumped(good), {"content-type": media_type} if media_type else {})
    for encoding in ("gzip", "br", "deflate", "a"):
        yield BadInput("POST", path, dumped(good), {"content-type": JSON, "content-encoding": encoding})
    yield BadInput("POST", path, dumped(good), {"content-type": "application/json; charset=utf-16"}, refused=False)


def _forms(path: str) -> Iterator[BadInput]:
    """Yield multipart forms that are none, or lack what they need, cut at every byte."""
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    purpose, end = part % (b"purpose", b"", b"batch"), b"--b--\r\n"
    form = purpose + part % (b"file", b'; filename="../../a"', b"a" * 30)
    name = {"content-type": "multipart/form-data; boundary=b"}
    for size in range(len(form)):
        yield BadInput("POST", path, form[:size], name)
    for body in (b"", end, purpose + end, purpose * 20 + end, part % (b"file", b"", b"a") + end, *NO_BODIES):
        yield BadInput("POST", path, body, name)
    for text in (b"\xff", b"", b"a" * 5_000):
        yield BadInput("POST", path, part % (text, b"", text) + form + end, name)
    for media_type in (
        *MEDIA_TYPES,
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=b",
    ):
        yield BadInput("POST", path, form + end, {"content-type": media_type} if media_type else {})


def _spoilt(document: Document, schema: Document, value: Any, skip: int, depth: int = 0) -> Iterator[Any]:
    """Yield copies of a value with one thing wrong in each. `skip`: levels at the top of which nothing is spoilt."""
    schema = _fitting(document, schema, value)
    if isinstance(value, dict) and "properties" in schema:
        properties = schema["properties"]
        names = list(properties) if not skip else [name for name in value if isinstance(value[name], (dict, list))]
        if not skip:
            for name in ("Model", "x" * 3_000, "a\nb", "", "__class__", "\u202e"):
                yield {**value, name: 1}
            for name in value:
                yield {key: item for key, item in value.items() if key != name}
        for name in names:
            if not skip:
                for wrong in (*POOL, *(long for long in LONG if allows(document, properties[name], long))):
                    if wrong is not None or name in schema.get("required", ()):
                        yield {**value, name: wrong}
            if name in value and depth < MAX_DEPTH:
                for inner in _spoilt(document, properties[name], value[name], max(0, skip - 1), depth + 1):
                    yield {**value, name: inner}
    elif isinstance(value, list):
        for index, item in enumerate(value):
            for wrong in () if skip or depth > 1 else POOL:
                yield [*value[:index], wrong, *value[index + 1 :]]
            for inner in _spoilt(document, schema.get("items", {}), item, skip, depth + 1):
                yield [*value[:index], inner, *value[index + 1 :]]


def _resolved(document: Document, schema: Document) -> Document:
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _fitting(document: Document, schema: Document, value: Any) -> Document:
    """Return the schema, of several the one that allows the value."""
    schema = _resolved(document, schema)
    for one in schema.get("anyOf", ()):
        if allows(document, one, value):
            return _fitting(document, one, value)
    return schema


def allows(document: Document, schema: Document, value: Any) -> bool:
    """Tell whether a schema allows a value, as far as schemas of the document go: they have few keywords."""
    schema = _resolved(document, schema)
    if "anyOf" in schema:
        return any(allows(document, one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": number and value == value // 1,
        "number": number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    if "type" in schema and not kinds[schema["type"]]:
        return False
    if number and schema.get("type") in ("integer", "number"):
        low, high, above = (schema.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
        return (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    if isinstance(value, str) and "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    if isinstance(value, list):
        return all(allows(document, schema.get("items", {}), item) for item in value)
    if isinstance(value, dict):
        more = schema.get("additionalProperties", True)
        others = [item for name, item in value.items() if name not in schema.get("properties", {})]
        return (
            set(schema.get("required", ())) <= set(value)
            and all(
                allows(document, one, value[name])
                for name, one in schema.get("properties", {}).items()
                if name in value
            )
            and (not others or (more is not False and (more is True or all(allows(document, more, o) for o in others))))
        )
    return True


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()
