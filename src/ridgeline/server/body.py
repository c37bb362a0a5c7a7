"""Reading a request body: bounded while it arrives, decoded and checked in one pass, off the event loop if large."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.core.errors import OverloadedError, RequestError
from ridgeline.server.service import Service

LARGE_BYTES = 64 * 2**10  # decoding more than this takes long enough for other requests to notice
MIN_BYTES_PER_S = 64 * 2**10  # a body that comes more slowly, after its first seconds, holds a connection on purpose
MAX_METADATA_BYTES = 128 * 2**10  # all that `Metadata` allows, each character as two escapes
MAX_NAME_CHARS = 100
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_FIRST_NAME = re.compile(r"[A-Za-z_]\w*")
_FIELD = re.compile(r"field `(.*)`$", re.DOTALL)
_IN_HEADER = re.compile(r"[A-Za-z0-9_.-]{1,64}")

T = TypeVar("T")
Run = Callable[[Service, Request, Any], Awaitable[Response]]


class _Skimmed(msgspec.Struct):
    """Holds what of a large body is looked at before it is decoded: with many keys that takes 20 times longer."""

    metadata: msgspec.Raw = msgspec.Raw()


_SKIM = msgspec.json.Decoder(_Skimmed | list[msgspec.Raw])


class Post(Route):
    """A path that takes a JSON body of type `body`; `run` gets it so, or, to tell what was ignored, as it came."""

    def __init__(self, path: str, service: Service, run: Run, body: Any) -> None:
        config = getattr(body, "__struct_config__", None)
        ignores = config is not None and not config.forbid_unknown_fields
        decoder = msgspec.json.Decoder(dict[str, Any] if ignores else body)

        async def endpoint(http: Request) -> Response:
            return await run(service, http, await read_json(http, decoder))

        super().__init__(path, endpoint, methods=["POST"])
        self.body = body


def naming_ignored(response: Response, names: Iterable[str]) -> Response:
    """Say in a header what of a body was ignored."""
    if ignored := [name for name in dict.fromkeys(names) if _IN_HEADER.fullmatch(name)][:32]:
        response.headers["x-ridgeline-ignored"] = ", ".join(ignored)
    return response


async def read_json(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Read the body as `decoder`'s type.

    Raises HTTPException 408, 413 or 415, OverloadedError where bodies fill the memory set aside for them, RequestError
    that names the field for anything the type does not allow, and ClientDisconnect.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "the body must be JSON: send 'Content-Type: application/json'")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "compressed bodies are not taken: leave out Content-Encoding")
    service = request.app.state.service
    assert isinstance(service, Service)
    body = bytearray()
    try:
        async for chunk in read_chunks(request, service, service.settings.max_body_bytes):
            if len(chunk) > service.body_room_bytes:
                raise OverloadedError("the bodies of other requests fill the memory that is set aside; retry later")
            service.body_room_bytes -= len(chunk)
            body += chunk
        if len(body) > LARGE_BYTES:
            return await asyncio.to_thread(_decode, decoder, body)
        return _decode(decoder, body)
    finally:
        service.body_room_bytes += len(body)


async def read_chunks(request: Request, service: Service, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives. Raises HTTPException 408 or 413, and ClientDisconnect."""
    too_large = HTTPException(413, f"the body is larger than {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    deadline_s = asyncio.get_running_loop().time() + service.settings.body_timeout_s
    chunks = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise HTTPException(408, f"the body came too slowly: send {MIN_BYTES_PER_S // 2**10} KiB/s") from error
        if chunk is None:
            return
        max_bytes -= len(chunk)
        if max_bytes < 0:
            raise too_large
        deadline_s += len(chunk) / MIN_BYTES_PER_S
        yield chunk


def converted(values: Mapping[str, Any], kind: type[T], *, strict: bool = True) -> T:
    """Return a decoded body as its type; without `strict` texts may be numbers. Raises RequestError with the field."""
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error


def _decode(decoder: msgspec.json.Decoder[T], body: bytearray) -> T:
    try:
        if len(body) > LARGE_BYTES and len(getattr(_SKIM.decode(body), "metadata", ())) > MAX_METADATA_BYTES:
            words = "metadata: expected at most 16 keys of 64 characters, and values of 512"
            raise RequestError(words, param="metadata")
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", code="invalid_json") from error


def _explain(message: str) -> RequestError:
    """Put msgspec's words into a RequestError, with the field that they are about as `param`."""
    place = _PLACE.search(message)
    where = place.group(1) if place else ""
    what = message[: place.start()] if place else message
    field = _FIELD.search(what)
    first = _FIRST_NAME.match(where)
    param = first.group() if first else field.group(1) if field else None
    if "unknown field" in what and field is not None:
        text = f"unknown field {field.group(1)[:MAX_NAME_CHARS]!r}{f' in {where}' if where else ''}; leave it out"
        return RequestError(text, param=None if param is None else param[:MAX_NAME_CHARS], code="unknown_field")
    return RequestError(f"{where[:MAX_NAME_CHARS] or 'body'}: {what[0].lower()}{what[1:]}", param=param)
