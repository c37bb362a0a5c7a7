"""The case table: whatever a body holds, the output is a documented 4xx with OpenAI's error keys, and life goes on."""

import itertools
import json
from collections.abc import Iterator

import pytest
from live_server import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {
    COMPLETIONS: {"model": "stories-chat", "prompt": "Once", "max_tokens": 2},
    CHAT: {"model": "stories-chat", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 2},
}
NUMBERS = ("1", True, [], {}, float("nan"), float("inf"), 1e308, -1e308)
WHOLE = ("1", True, 1.5, [], {}, 2**63, 2**64, -(2**63) - 1, 10**400)
FLAGS = ("true", 1, 0, [], {}, 1.0)

BOTH: dict[str, tuple[object, ...]] = {
    "model": (1, True, [], {}, "", "nope", "../../etc/passwd", "a" * 100_000, "stories-chat\x00"),
    "n": (*WHOLE, 0, -1, 129, 65),
    "max_tokens": (*WHOLE, 0, -1, 10_000, 512),
    "temperature": (*NUMBERS, -0.1, 101),
    "top_p": (*NUMBERS, 0, -0.5, 1.0001),
    "top_k": (*WHOLE, -2),
    "min_p": (*NUMBERS, -0.1, 1.1),
    "repetition_penalty": (*NUMBERS, 0, -1),
    "presence_penalty": (*NUMBERS, 2.1, -2.1),
    "frequency_penalty": (*NUMBERS, 2.1, -2.1),
    "seed": ("1", True, 1.5, [], 2**64, -(2**63) - 1, 10**400),
    "stop": (1, True, {}, "", [""], ["a"] * 17, ["a" * 257], [1], [None], "a" * 1000),
    "stop_token_ids": (1, "1", {}, ["1"], [-1], [512], [1.5], [2**40], [0] * 129),
    "logit_bias": ([], "a", {"x": None}, {"-1": 1}, {"512": 1}, {"1": 101}, {"1": "1"}, {"": 1}, {"x" * 300: 1}),
    "min_tokens": (*WHOLE, -1, 3),
    "ignore_eos": FLAGS,
    "skip_special_tokens": FLAGS,
    "include_stop_str_in_output": FLAGS,
    "return_token_ids": FLAGS,
    "prompt_logprobs": (*WHOLE, -1, 21),
    "priority": (*WHOLE,),
    "stream": FLAGS,
    "stream_options": (True, [], {"include_usage": True}, {"nope": 1}, {"include_usage": 1}),
    "user": (1, [], {}),
    "metadata": (1, [], {"a": 1}, {"a": {}}),
    "store": (0, "false"),
    "service_tier": ("fastest", 1),
    "guided_json": (1, [1], "{", {"uniqueItems": True}),
    "guided_choice": ([], [""], "a", [1]),
    "structured_outputs": ({}, {"nope": 1}, {"regex": "a", "choice": ["b"]}, 1),
    "grammar": (1, "", "root ::= other"),
    "Prompt": ("Once",),
    "": (1,),
    "x" * 50_000: (1,),
    "new\nline": (1,),
}
COMPLETION_ONLY: dict[str, tuple[object, ...]] = {
    "prompt": (
        *(None, 1, 1.5, True, {}, [], [[]], [1, "a"], [1, [2]], ["a", [1]], [1.5], [True], [None], [-1], [512]),
        *([2**70], [[1], []], [[1], [512]], [[["a"]]], [1] * 600, "a " * 4000, ["a"] * 129, [1] * 100_000),
    ),
    "echo": FLAGS,
    "logprobs": (*WHOLE, -1, 21),
    "best_of": (*WHOLE, -1, 0, 129),
    "suffix": (1, "after"),
    "messages": ([],),
}
BAD_MESSAGES = (
    *({"role": role, "content": "a"} for role in ("robot", "tool", "function", 1, None, "User")),
    *({"role": "user", "content": content} for content in (1, {}, [1], ["a"], [{}], [{"type": "text"}])),
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
    {"role": "user", "content": [{"type": "text", "text": 1}]},
    {"role": "user", "content": [{"type": ["x"], "text": "a"}]},
    {"role": "user", "content": "a", "name": 1},
    {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]},
    {"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": ""}},
    {"role": "user", "content": "a " * 4000},
    {"role": "user"},
    {"content": "a"},
    {},
)
CHAT_ONLY: dict[str, tuple[object, ...]] = {
    "messages": (None, "a", {}, [], [1], ["a"], [[]], *([message] for message in BAD_MESSAGES)),
    "max_completion_tokens": (*WHOLE, 0, -1, 10_000, 3),
    "logprobs": FLAGS,
    "top_logprobs": (*WHOLE, 1, -1, 21),
    "speculation": ({"enabled": 1}, {"num_speculative_tokens": -1}, {"num_speculative_tokens": 65}, {"k": 1}, True, []),
    "tools": ([{"type": "function", "function": {"name": "a b"}}], [{"type": "function"}], [{"type": "x"}], [1], 1, {}),
    "tool_choice": ("required", {"type": "function"}, 1),
    "response_format": ({"type": "xml"}, {"type": "json_schema"}, "text", 1, []),
    "functions": ([{"name": "f"}],),
    "function_call": ({"name": "f"},),
    "modalities": (["audio"], "text"),
    "audio": ({"voice": "a"},),
    "prediction": (
        *({"type": "content"}, {"content": "a"}, {"type": "text", "content": "a"}, "a", [], 1),
        *(
            {"type": "content", "content": wrong}
            for wrong in (None, 1, ["a"], [{"type": "image_url"}], [{"type": "text"}])
        ),
    ),
    "web_search_options": ({},),
    "reasoning_effort": ("huge", 1),
    "chat_template_kwargs": (1, [], {"messages": []}, {"bos_token": "x"}, {"not a name": 1}),
    "add_generation_prompt": FLAGS,
    "prompt": ("Once",),
    "suffix": ("a",),
}
RAW = (
    b"",
    b"null",
    b"[]",
    b"1",
    b'"a"',
    b"{",
    b"{}",
    b'{"prompt"',
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a\x00b"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a"} {}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": [{"role": "user", "content": [' + b'{"a":' * 100_000,
    b'{"prompt": "a", "store": ' + b"[" * 100_000,
    b"{" * 100_000,
    b'{"prompt": [' + b"1," * 100_000,
)


def cases() -> Iterator[tuple[str, str, bytes]]:
    """(path, field, body): a good body with one field spoilt, and bodies that are none."""
    for path, own in ((COMPLETIONS, COMPLETION_ONLY), (CHAT, CHAT_ONLY)):
        for name, values in itertools.chain(BOTH.items(), own.items()):
            for value in values:
                if name == "top_logprobs" and value != 1:
                    yield path, name, json.dumps(GOOD[path] | {"logprobs": True, name: value}).encode()
                else:
                    yield path, name, json.dumps(GOOD[path] | {name: value}).encode()
        for body in RAW:
            yield path, "", body


def test_the_table_is_worth_its_name() -> None:
    assert len(list(cases())) > 500


def test_every_bad_body_is_a_clear_4xx(live: LiveServer) -> None:
    wrong: list[str] = []
    for path, name, body in cases():
        response = live.client.post(path, content=body, headers={"content-type": "application/json"})
        label = f"{path} {name[:20]} {body[-80:]!r}: {response.status_code} {response.text[:160]}"
        if response.status_code not in (400, 404, 413):
            wrong.append(label)
            continue
        error = response.json()["error"]
        fit = (
            set(response.json()) == {"error"}
            and set(error) == {"message", "type", "param", "code"}
            and error["type"] == "invalid_request_error"
            and isinstance(error["param"], str | None)
            and 0 < len(error["message"]) <= 1000
            and "x-request-id" in response.headers
        )
        if not fit:
            wrong.append(label)
    assert not wrong, "\n".join(wrong)
    assert live.complete(prompt=[1], max_tokens=3, temperature=0)["choices"][0]["text"] == "Once upon a"
    live.assert_idle()


@pytest.mark.parametrize(
    ("path", "change", "param", "code"),
    [
        (COMPLETIONS, {"temperature": -1}, "temperature", None),
        (COMPLETIONS, {"max_tokens": "5"}, "max_tokens", None),
        (COMPLETIONS, {"nope": 1}, "nope", "unknown_field"),
        (COMPLETIONS, {"stream": True, "stream_options": {"nope": 1}}, "stream_options", "unknown_field"),
        (COMPLETIONS, {"logit_bias": {"": 1}}, "logit_bias", None),
        (COMPLETIONS, {"max_tokens": 600}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"model": "nope"}, "model", "model_not_found"),
        (COMPLETIONS, {"best_of": 0}, "best_of", None),
        (CHAT, {"max_tokens": 600}, "messages", "context_length_exceeded"),
        (CHAT, {"tools": [{}]}, "tools", None),
        (CHAT, {"messages": [{"role": "x", "content": "a"}]}, "messages", None),
    ],
)
def test_errors_name_the_field(live: LiveServer, path: str, change: dict, param: str, code: str | None) -> None:
    error = live.client.post(path, json=GOOD[path] | change).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_a_body_too_large_is_refused_while_it_arrives(live: LiveServer) -> None:
    big = b'{"prompt": "' + b"a" * (3 * 2**20) + b'"}'
    headers = {"content-type": "application/json"}
    declared = live.client.post(COMPLETIONS, content=big, headers=headers)
    assert declared.status_code == 413
    assert declared.json()["error"]["code"] == "body_too_large"
    chunks = (big[start : start + 2**20] for start in range(0, len(big), 2**20))
    assert live.client.post(COMPLETIONS, content=chunks, headers=headers).status_code == 413
    largest = b'{"prompt": "' + b"a" * (2**20) + b'"}'
    error = live.client.post(COMPLETIONS, content=largest, headers=headers)
    assert error.status_code == 400
    assert error.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/nope", {}, 404),
        ("GET", "/v1/", {}, 404),
        ("GET", "/v1/models/", {}, 404),
        ("GET", "/v1/models/a/b", {}, 404),
        ("GET", "/v1/models/%00%0a", {}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("POST", "/health", {}, 405),
        ("POST", COMPLETIONS, {}, 415),
        ("POST", COMPLETIONS, {"content-type": "text/plain"}, 415),
        ("POST", COMPLETIONS, {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("POST", COMPLETIONS, {"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ("POST", COMPLETIONS, {"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
)
def test_paths_methods_and_media_types(live: LiveServer, method: str, path: str, headers: dict, status: int) -> None:
    content = json.dumps(GOOD[COMPLETIONS]).encode() if method == "POST" else None
    response = live.client.request(method, path, content=content, headers=headers)
    assert response.status_code == status, response.text
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert response.headers["allow"]
