"""Files: tables that the package has as data, and results that appear whole or not at all."""

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

AHEAD_BYTES = 1 << 20  # asked for at once; the system reads no more of a longer piece


def read_toml(module_file: str, name: str) -> dict[str, Any]:
    """Return what the file `name` beside a module, whose `__file__` is given, says."""
    import tomllib  # not for a start that reads no table

    return tomllib.loads(Path(module_file).with_name(name).read_text(encoding="utf-8"))


def read_ahead(files: Sequence[Path]) -> None:
    """Let the system read files into memory, in order and in a thread, before they are mapped bit by bit."""

    def ask() -> None:
        for path in files:
            with contextlib.suppress(OSError), path.open("rb") as file:  # who needs it says what is wrong
                for begin in range(0, os.fstat(file.fileno()).st_size, AHEAD_BYTES):
                    os.posix_fadvise(file.fileno(), begin, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    if hasattr(os, "posix_fadvise"):  # not on every system
        threading.Thread(target=ask, name="read-ahead", daemon=True).start()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, which appears whole or not at all, in a folder that is made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_cut_off(folder: Path) -> None:
    """Remove what processes left that were killed in `write_whole`, or amid a file of safetensors.

    Nobody may write in the folder meanwhile.
    """
    for path in folder.glob(".*"):
        if path.suffix[1:].isdecimal() or re.fullmatch(r"\.tmp\w{6}", path.name):
            path.unlink()
