"""Tables that the package has as data: TOML files beside the module that reads them."""

from pathlib import Path
from typing import Any


def read_toml(module_file: str, name: str) -> dict[str, Any]:
    """Return what the file `name` beside a module, whose `__file__` is given, says."""
    import tomllib  # not for a start that reads no table

    return tomllib.loads(Path(module_file).with_name(name).read_text(encoding="utf-8"))
