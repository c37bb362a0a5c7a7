"""The training corpus that every machine has: the source of Python's standard library.

Whole top-level modules are held out, chosen by a hash of their name, so that the split is the same on every machine
and no held-out file has a sibling in training. Used by `ridgeline train` and by quality measurements.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 20
# Tests repeat themselves, and tables of code points are data rather than code.
EXCLUDED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "pydoc_data", "encodings", "__pycache__"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source file; `module` is its top-level module."""

    module: str
    path: str  # relative to the library, with forward slashes
    text: str


def standard_library() -> list[SourceFile]:
    """Read every module's source in the running interpreter's standard library, sorted by path."""
    return sorted(_files(Path(sysconfig.get_paths()["stdlib"])), key=lambda file: file.path)


def _files(root: Path) -> Iterator[SourceFile]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few files are written in other encodings on purpose
        if text.strip():
            yield SourceFile(relative.parts[0].removesuffix(".py"), relative.as_posix(), text)


def is_held_out(module: str) -> bool:
    """Tell whether no training run may see the module: one in twenty by the SHA-256 of the name."""
    return hashlib.sha256(module.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def split(files: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """Split the files into training files and held-out files."""
    train = [file for file in files if not is_held_out(file.module)]
    return train, [file for file in files if is_held_out(file.module)]


def fingerprint(files: list[SourceFile]) -> str:
    """Return the SHA-256 over all paths and texts, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.path}\0{file.text}\0".encode())
    return digest.hexdigest()
