"""Reading a request body: bounded while it arrives, decoded and checked in one pass, off the event loop if large."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ridgeline.core.errors import RequestError

LARGE_BYTES = 64 * 2**10  # decoding more than this takes long enough for other requests to notice
MAX_NAME_CHARS = 100
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_FIRST_NAME = re.compile(r"[A-Za-z_]\w*")
_FIELD = re.compile(r"field `(.*)`$", re.DOTALL)

T = TypeVar("T")


async def read_json(request: Request, decoder: msgspec.json.Decoder[T], max_bytes: int) -> T:
    """Read the body as `decoder`'s type.

    Raises HTTPException 413 or 415, RequestError that names the field for anything the type does not allow, and
    ClientDisconnect.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "the body must be JSON: send 'Content-Type: application/json'")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "compressed bodies are not taken: leave out Content-Encoding")
    body = await _read(request, max_bytes)
    if len(body) > LARGE_BYTES:
        return await asyncio.to_thread(_decode, decoder, body)
    return _decode(decoder, body)


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    too_large = length.isdecimal() and int(length[:20]) > max_bytes
    body = bytearray()
    if not too_large:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                too_large = True
                break
    if too_large:
        raise HTTPException(413, f"the body is larger than {max_bytes} bytes", {"Connection": "close"})
    return bytes(body)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
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
