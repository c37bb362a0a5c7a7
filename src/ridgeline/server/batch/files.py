"""/v1/files: what clients upload for batches, and what batches have written."""

import asyncio
import os
import time
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import msgspec
from msgspec import Meta
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartCallbacks, MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response

from ridgeline.core.errors import OverloadedError, RequestError
from ridgeline.server.batch.store import Kept, StoredFile, new_id
from ridgeline.server.body import converted, read_body
from ridgeline.server.openai.paging import page
from ridgeline.server.service import Service, note_of

if TYPE_CHECKING:
    from ridgeline.server.batch.batches import Batches

MAX_OBJECTS = 10_000  # files of a key, and batches
MAX_ARRIVING = 16  # uploads at a time
FORM_BYTES = 64 * 2**10  # of an upload, beside its file
MAX_FIELDS, MAX_FIELD_BYTES, MAX_NAME_CHARS = 8, 4096, 255


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=30 * 24 * 3600)]


class FileForm(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/files, beside the file itself."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


FILE_FORM = {  # as clients send it
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 30 * 24 * 3600},
    },
    "required": ["file", "purpose"],
}


def batches_of(service: Service) -> "Batches":
    """Return what has the files and runs the batches. Raises HTTPException 404 where none are kept."""
    if service.batches is None:
        raise HTTPException(404, "files and batches are not kept here: start the server with --files DIR")
    return service.batches


async def list_files(service: Service, http: HttpRequest) -> Response:
    """List the client's files. Raises what errors.py maps."""
    found = batches_of(service).folder.listed(note_of(http).client.salt, StoredFile)
    purpose = http.query_params.get("purpose")
    listed = [(each.id, each) for each in found if purpose in (None, each.purpose)]
    return page(listed, http.query_params, MAX_OBJECTS)


async def stored_file(service: Service, http: HttpRequest) -> Response:
    """Serve what is asked about one file. Raises what errors.py maps."""
    folder, owner = batches_of(service).folder, note_of(http).client.salt
    file = folder.get(owner, str(http.path_params["file_id"]), StoredFile)
    if http.method == "DELETE":
        folder.delete(owner, file.id)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})
    if http.url.path.endswith("/content"):
        return FileResponse(folder.path(file.id), media_type="application/jsonl", filename=file.filename)
    return Response(msgspec.json.encode(file), media_type="application/json")


async def create_file(service: Service, http: HttpRequest) -> Response:
    """Take a file, piece by piece, to the disk. Raises what errors.py maps."""
    folder, owner, most = batches_of(service).folder, note_of(http).client.salt, service.settings.max_files_bytes
    kept = folder.listed(owner, StoredFile)
    room = most - sum(file.bytes for file in kept)
    if room <= 0 or len(kept) >= MAX_OBJECTS:
        raise RequestError(f"the files of this key have {most} bytes, or are {MAX_OBJECTS}: delete some", param="file")
    if folder.num_arriving >= MAX_ARRIVING:
        raise OverloadedError("other files are arriving; retry later")
    name = new_id("file-")
    path = folder.path(name)  # without a description it is no file yet
    folder.num_arriving += 1
    try:
        with path.open("wb") as file:
            upload = _Upload(http.headers.get("content-type", ""), file)
            await read_body(http, service, min(room, service.settings.max_file_bytes) + FORM_BYTES, upload.write)
            about = upload.about(name)
            await asyncio.to_thread(_sync, file)
        await asyncio.to_thread(folder.put, Kept(owner=owner, about=about))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        folder.num_arriving -= 1
    return Response(msgspec.json.encode(about), media_type="application/json")


class _Upload:
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


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
