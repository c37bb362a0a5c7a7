"""How a model folder says that texts become vectors, as sentence-transformers has it. Called by the engine's build."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.params import PoolingKind
from ridgeline.weights.jsonfile import read_json_object

CONFIG = Path("1_Pooling") / "config.json"
MODES: Mapping[str, PoolingKind] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def read_pooling(folder: Path) -> PoolingKind | None:
    """Read the kind of pooling that the folder asks for; None where it is silent.

    Raises ModelLoadError for several at once, or one that is not supported.
    """
    path = folder / CONFIG
    if not path.is_file():
        return None
    config = cast("Mapping[str, object]", read_json_object(path))
    asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(asked) != 1 or asked[0] not in MODES:
        known = ", ".join(MODES)
        raise ModelLoadError(f"{path}: exactly one of {known} must be true, not {', '.join(asked) or 'none'}")
    return MODES[asked[0]]
