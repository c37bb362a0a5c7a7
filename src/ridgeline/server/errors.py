"""Make an HTTP error of an exception, here and nowhere else: status, headers and OpenAI's error body.

Every route, every status of 400 and above, and the error event of a broken stream come through `reply_to`.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ridgeline.core.errors import ModelNotFoundError, OverloadedError, QuarantinedError, RequestError

INTERNAL_MESSAGE = "the server failed to process this request; the log has the details under this request id"
MAX_MESSAGE_CHARS = 1000

_HTTP_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    421: "unknown_host",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    501: "unsupported_transfer_coding",
    505: "unsupported_http_version",
}
_HTTP_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 500: "api_error", 529: "overloaded_error"}


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's Error schema: all four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as HTTP has it. `unexpected` ones are ours: they belong in the log with a traceback."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    unexpected: bool = False
    anthropic_id: str = ""  # a request's: the error is worded as Anthropic's

    @property
    def json(self) -> bytes:
        if not self.anthropic_id:
            return msgspec.json.encode({"error": self.body})
        error = {"type": _ANTHROPIC_TYPES.get(self.status, self.body.type), "message": self.body.message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": self.anthropic_id})

    def response(self) -> Response:
        return Response(self.json, self.status, dict(self.headers), media_type="application/json")


def reply_to(error: BaseException) -> ErrorReply:
    """Return the reply that tells the client of `error`; of our own failures it says only that there was one."""
    match error:
        case RequestError():
            status = 404 if isinstance(error, ModelNotFoundError) else 400
            message = str(error)[:MAX_MESSAGE_CHARS]
            return ErrorReply(status, ErrorBody(message, "invalid_request_error", error.param, error.code))
        case OverloadedError():
            body = ErrorBody(str(error), "service_unavailable", None, "server_is_overloaded")
            return ErrorReply(503, body, {"Retry-After": str(error.retry_after_s)})
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return reply_to(OverloadedError("the disk of this server is full; retry later"))
        case HTTPException():
            status = error.status_code
            kind = _HTTP_TYPES.get(status, "invalid_request_error")
            message = error.detail if error.detail != HTTPStatus(status).phrase else _plain_words(status)
            return ErrorReply(status, ErrorBody(message, kind, None, _HTTP_CODES.get(status)), error.headers or {})
        case QuarantinedError():
            body = ErrorBody(str(error), "server_error", None, "request_quarantined")
            return ErrorReply(500, body, {"x-should-retry": "false"})
        case _:  # EngineError too: a step failed, and trying the same again would fail the same
            body = ErrorBody(INTERNAL_MESSAGE, "server_error", None, "internal_error")
            return ErrorReply(500, body, {"x-should-retry": "false"}, unexpected=True)


def _plain_words(status: int) -> str:
    words = {404: "there is nothing at this path", 405: "this path does not take this method"}
    return words.get(status, HTTPStatus(status).phrase)
