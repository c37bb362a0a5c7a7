"""/v1/files: what clients upload for batches, and what batches have written."""

import asyncio
import os
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response

from ridgeline.core.errors import OverloadedError, RequestError
from ridgeline.server.batch.store import Kept, StoredFile, new_id
from ridgeline.server.body import read_body
from ridgeline.server.openai.paging import page
from ridgeline.server.service import Service, note_of

if TYPE_CHECKING:
    from ridgeline.server.batch.batches import Batches

MAX_OBJECTS = 10_000  # files of a key, and batches
MAX_ARRIVING = 16  # uploads at a time
FORM_BYTES = 64 * 2**10  # of an upload, beside its file


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=30 * 24 * 3600)]


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
    from ridgeline.server.batch.upload import Upload  # with python-multipart, for those who upload

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
            upload = Upload(http.headers.get("content-type", ""), file)
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


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
