"""Upload: the multipart form of POST /v1/files, whose file goes to the disk as it arrives."""

import time
from typing import TYPE_CHECKING, BinaryIO, Literal

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException

from ridgeline.core.errors import RequestError
from ridgeline.server.batch.files import ExpiresAfter
from ridgeline.server.batch.store import StoredFile
from ridgeline.server.body import converted

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELDS, MAX_FIELD_BYTES, MAX_NAME_CHARS = 8, 4096, 255


class FileForm(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/files, beside the file itself."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class Upload:
    """Writes the file of a multipart form to `file` as it arrives, and keeps the other fields."""

    def __init__(self, content_type: str, file: BinaryIO) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise HTTPException(415, "a file is uploaded as multipart/form-data, with a boundary")
        self._file = file
        self._fields: dict[str, bytes] = {}  # that have begun
        self._filename = ""
        self._header, self._value, self._name = b"", b"", ""
        self._is_whole = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_part_data": self._add_data,
            "on_end": self._end,
        }
        self._parser = MultipartParser(options[b"boundary"], callbacks)

    def write(self, chunk: bytes) -> None:
        """Take more of the body. Raises RequestError."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise RequestError(f"the body is no multipart form: {error}", code="invalid_multipart") from error

    def about(self, name: str) -> StoredFile:
        """Describe the file, which is whole. Raises RequestError."""
        if not self._is_whole or "file" not in self._fields:
            raise RequestError("the form has no file: send one in the field file", param="file")
        texts = {key: value.decode("utf-8", "replace") for key, value in self._fields.items() if key != "file"}
        nested = {key: value for key, value in texts.items() if "[" not in key}
        if after := {key[len("expires_after[") : -1]: value for key, value in texts.items() if "[" in key}:
            nested["expires_after"] = after
        form, now_s = converted(nested, FileForm, strict=False), int(time.time())
        expires_at = None if form.expires_after is None else now_s + form.expires_after.seconds
        return StoredFile(
            id=name,
            bytes=self._file.tell(),
            created_at=now_s,
            filename=self._filename,
            purpose=form.purpose,
            expires_at=expires_at,
        )

    def _begin_part(self) -> None:
        self._name = ""

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name in self._fields or len(self._fields) > MAX_FIELDS:
                raise RequestError(f"the form has {self._name[:40]!r} twice, or too many fields", param="file")
            self._fields[self._name] = b""
            if self._name == "file":
                self._filename = options.get(b"filename", b"upload").decode("utf-8", "replace")[:MAX_NAME_CHARS]
        self._header = self._value = b""

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._file.write(data[start:end])
            return
        self._fields[self._name] = self._fields.get(self._name, b"") + data[start:end]
        if len(self._fields[self._name]) > MAX_FIELD_BYTES:
            raise RequestError(f"the field {self._name[:40]!r} has more than {MAX_FIELD_BYTES} bytes", param="file")

    def _end(self) -> None:
        self._is_whole = True
