"""Files: tables that the package has as data, and results that appear whole or not at all."""

import os
from pathlib import Path
from typing import Any


def read_toml(module_file: str, name: str) -> dict[str, Any]:
    """Return what the file `name` beside a module, whose `__file__` is given, says."""
    import tomllib  # not for a start that reads no table

    return tomllib.loads(Path(module_file).with_name(name).read_text(encoding="utf-8"))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, which appears whole or not at all, in a folder that is made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
