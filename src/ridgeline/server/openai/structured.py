"""Read what a body says its outputs must be, in the words of OpenAI, vLLM and llama.cpp -> StructuredOutputsParams."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.server.openai.protocol import ResponseFormat, SamplingFields

BACKENDS = ("auto", "guidance", "xgrammar", "outlines")  # names that vLLM takes; the engine of masks is always the same
_ALIASES: Mapping[str, str] = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "grammar": "grammar",
}


def structured_outputs(body: SamplingFields) -> StructuredOutputsParams | None:
    """Return the one constraint of a body, None without any. Raises RequestError that names the field."""
    given = _given(body)
    if len(given) > 1:
        names = " and ".join(given)
        raise RequestError(f"{names} both say what the output must be; give one of them", param=next(iter(given)))
    if body.guided_decoding_backend not in (None, *BACKENDS):
        message = f"guided_decoding_backend must be one of {', '.join(BACKENDS)}; leave it out"
        raise RequestError(message, param="guided_decoding_backend")
    for name, values in given.items():
        if name.startswith("guided_") and body.guided_whitespace_pattern is not None:
            values["whitespace_pattern"] = body.guided_whitespace_pattern
        with blamed_on(name):
            return StructuredOutputsParams(**values)
    return None


def field_of(body: SamplingFields) -> str:
    """Name the field of a body that holds its constraint."""
    return next(iter(_given(body)), "structured_outputs")


@contextmanager
def blamed_on(name: str) -> Generator[None]:
    """Make errors about the constraint name the field of the body where it stands."""
    try:
        yield
    except RequestError as error:
        if error.param not in (*StructuredOutputsParams.KINDS, "structured_outputs", "whitespace_pattern"):
            raise
        raise RequestError(f"{name}: {error}", param=name, code=error.code) from error


def _given(body: SamplingFields) -> dict[str, dict[str, Any]]:
    """Return the fields that are set, each with what it means for StructuredOutputsParams."""
    given: dict[str, dict[str, Any]] = {
        name: {kind: value} for name, kind in _ALIASES.items() if (value := getattr(body, name)) is not None
    }
    fields: Any = getattr(body, "structured_outputs", None)
    if fields is not None:
        given["structured_outputs"] = {k: v for k, v in msgspec.structs.asdict(fields).items() if v is not None}
    if body.response_format is not None and (values := _of_format(body.response_format)) is not None:
        given["response_format"] = values
    return given


def _of_format(response_format: ResponseFormat) -> dict[str, Any] | None:
    if response_format.type == "text":
        return None
    if response_format.type == "json_object":
        schema = response_format.schema
        return {"json_object": True} if schema is None else {"json": schema}
    form = response_format.json_schema
    if form is None:
        raise RequestError("response_format of type json_schema needs json_schema", param="response_format")
    return {"json": True if form.schema is None else form.schema}
