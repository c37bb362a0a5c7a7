"""/v1/files: what clients upload for batches, and what batches have written."""

import asyncio
import logging
import os
import time
from contextlib import aclosing, closing
from shutil import copyfileobj
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ridgeline.core.errors import OverloadedError, RequestError
from ridgeline.server.batch.store import Folder, Stored, StoredFile, new_id
from ridgeline.server.body import converted, read_chunks
from ridgeline.server.openai.paging import page
from ridgeline.server.service import Service, note_of
from ridgeline.server.sse import FileContent

if TYPE_CHECKING:
    from ridgeline.server.batch.batches import Batches

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # no client can fill the log
MAX_OBJECTS = 10_000  # files of a key, and batches
MAX_ARRIVING = 16  # uploads at a time
FORM_BYTES, MAX_FIELD_BYTES = 64 * 2**10, 4096  # of an upload beside its file, and of one field


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """Says when a file expires."""

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
    """Return what has the files and runs the batches. Raises HTTPException 404 where none are stored."""
    if service.batches is None:
        raise HTTPException(404, "files and batches are not stored here: start the server with --files DIR")
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
        content = FileContent(folder.path(file.id), media_type="application/jsonl", filename=file.filename)
        content.stall_timeout_s = service.settings.stall_timeout_s
        return content
    return Response(msgspec.json.encode(file), media_type="application/json")


async def create_file(service: Service, http: HttpRequest) -> Response:
    """Take a file, piece by piece, to the disk. Raises what errors.py maps."""
    folder, owner, most = batches_of(service).folder, note_of(http).client.salt, service.settings.max_files_bytes
    stored = folder.listed(owner, StoredFile)
    room = most - sum(file.bytes for file in stored)
    if room <= 0 or len(stored) >= MAX_OBJECTS:
        raise RequestError(f"the files of this key have {most} bytes, or are {MAX_OBJECTS}: delete some", param="file")
    if not http.headers.get("content-type", "").startswith("multipart/form-data"):
        raise HTTPException(415, "a file is uploaded as multipart/form-data")
    if folder.num_arriving >= MAX_ARRIVING:
        raise OverloadedError("other files are arriving; retry later")
    folder.num_arriving += 1
    try:
        body = read_chunks(http, service, min(room, service.settings.max_file_bytes) + FORM_BYTES)
        parser = _FormParser(http.headers, body, max_files=1, max_fields=8, max_part_size=MAX_FIELD_BYTES)
        async with aclosing(body):
            with closing(parser):
                file = await asyncio.to_thread(_put, folder, owner, await parser.parse())
    except MultiPartException as error:
        raise RequestError(f"the body is no form with a file: {error.message}", code="invalid_multipart") from error
    finally:
        folder.num_arriving -= 1
    return Response(msgspec.json.encode(file), media_type="application/json")


class _FormParser(MultiPartParser):
    """Closes the temporary files of forms that were cut, too."""

    def close(self) -> None:
        for file in self._files_to_close_on_error:
            file.close()


def _put(folder: Folder, owner: str, form: FormData) -> StoredFile:
    """Put the file of a form into the folder. Raises RequestError."""
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise RequestError("the form has no file: send one in the field file", param="file")
    texts = {key: value for key, value in form.items() if key != "file"}
    age = {key[14:-1]: texts.pop(key) for key in list(texts) if key.startswith("expires_after[")}
    fields = converted({**texts, **({"expires_after": age} if age else {})}, FileForm, strict=False)
    file_id, now_s = new_id("file-"), int(time.time())
    name = (upload.filename or "upload")[:255]
    expires_at = fields.expires_after and now_s + fields.expires_after.seconds
    try:
        with folder.path(file_id).open("wb") as content:  # without a description it is no file yet
            copyfileobj(upload.file, content)
            num_bytes = content.tell()
            content.flush()
            os.fsync(content.fileno())
        file = StoredFile(
            id=file_id, bytes=num_bytes, created_at=now_s, filename=name, purpose=fields.purpose, expires_at=expires_at
        )
        folder.put(Stored(owner=owner, about=file))
    except OSError:
        folder.path(file_id).unlink(missing_ok=True)
        raise
    return file
