"""Read the JSON files of a model folder, which nobody vouches for. Called by folder.py and checkpoint.py."""

import json
import math
from pathlib import Path
from typing import cast

from ridgeline.core.errors import ModelLoadError

MAX_JSON_BYTES = 16 << 20


def read_json_object(path: Path) -> dict[str, object]:
    """Read the JSON object in `path`.

    Raises ModelLoadError where the file is missing, above 16 MiB, not a regular file, not UTF-8, not one JSON
    object, nested too deeply, has a key twice, or has a number that JSON does not know (NaN, -Infinity).
    Infinity, which published configs use for a limit that is none, is read as a float.
    """
    try:
        if not path.is_file():  # a FIFO would block for ever
            raise ModelLoadError(f"{path} is missing or is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_JSON_BYTES:
        raise ModelLoadError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB; it is not a model's JSON file")
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {str(error)[:200]}; download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return cast("dict[str, object]", value)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} appears twice")
    return result


def _no_constant(name: str) -> object:
    if name == "Infinity":
        return math.inf
    raise ValueError(f"{name} is not a JSON number")
