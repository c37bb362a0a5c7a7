"""instructor: its modes over the clients of OpenAI and Anthropic, whole, partial and iterable."""

from collections.abc import Iterable

import anthropic
import instructor
import openai
from driving import MESSAGES, MODEL, TEXT, URL, check, run_checks
from pydantic import BaseModel, Field

OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0)
BODY = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "max_retries": 0}


class Pair(BaseModel, extra="forbid"):
    """A flag and a digit, and nothing else: a model this small would go on and on."""

    ok: bool
    n: int = Field(ge=0, le=9)


def client(mode: str) -> instructor.Instructor:
    return instructor.from_openai(OPENAI, mode=instructor.Mode[mode])


@check
def modes():
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        found = client(mode).chat.completions.create(response_model=Pair, seed=3, **BODY)
        assert isinstance(found, Pair), mode
    return found


@check
def mode_json_is_an_object_of_any_kind():
    try:
        return client("JSON").chat.completions.create(response_model=Pair, seed=3, **BODY)
    except Exception as error:  # a model this small writes others
        assert "validation" in str(error) or "Field required" in str(error), error
        return str(error)


@check
def responses_tools():
    asked = {"model": MODEL, "input": TEXT, "max_output_tokens": 200, "temperature": 1, "max_retries": 0}
    found = client("RESPONSES_TOOLS").responses.create(response_model=Pair, **asked)
    assert isinstance(found, Pair)
    return found


@check
def with_completion():
    found, raw = client("TOOLS").chat.completions.create_with_completion(response_model=Pair, seed=3, **BODY)
    assert isinstance(found, Pair) and raw.usage.completion_tokens > 0
    return raw.usage.completion_tokens


@check
def partial():
    for mode in ("TOOLS", "JSON_SCHEMA"):
        found = list(client(mode).chat.completions.create_partial(response_model=Pair, seed=3, **BODY))
        assert found[-1].ok is not None and found[-1].n is not None, mode
    return len(found)


@check
def iterable():
    return list(
        client("TOOLS").chat.completions.create_iterable(response_model=Pair, seed=3, **{**BODY, "max_tokens": 60})
    )


@check
def parallel_tools():
    ask = client("PARALLEL_TOOLS").chat.completions.create
    try:
        return list(ask(response_model=Iterable[Pair], seed=3, **BODY))
    except Exception as error:  # tool_choice is auto: a model this small calls nothing
        assert not isinstance(error, openai.APIError) and "40" not in str(error)[:12], error
        return repr(error)


@check
def of_anthropic():
    inner = anthropic.Anthropic(base_url=URL, api_key="unused", max_retries=0)
    found = instructor.from_anthropic(inner).messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=200, response_model=Pair, max_retries=0
    )
    assert isinstance(found, Pair)
    return found


run_checks("instructor")
