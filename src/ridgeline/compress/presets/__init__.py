"""The bundled models as data, a file each: config.json but for what the tokenizer decides, and the numbers of a recipe.

Called by bundle.py. Adding a preset is adding a file: which family it is of is said by `model_type` alone.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from ridgeline.compress.train import Recipe
from ridgeline.core.errors import ConfigError

FOLDER = Path(__file__).parent

Count = Annotated[int, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(gt=0)]


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds a model of ours. `token_ids`: keys of config.json, and the special token whose id each of them is.

    `starts_from`: the bundled model whose tokenizer and weights it begins with; None: it learns its own.
    """

    num_tokens: Count
    matrix_rate: Rate
    vector_rate: Rate
    starts_from: str | None = None
    token_ids: dict[str, str]
    config: dict[str, object]

    def recipe(self, num_tokens: int | None = None) -> Recipe:
        """Return how it is trained, over `num_tokens` where they are given."""
        return Recipe(
            num_tokens=num_tokens or self.num_tokens, matrix_rate=self.matrix_rate, vector_rate=self.vector_rate
        )


def names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_preset(name: str) -> Preset:
    """Load the preset `name`. Raises ConfigError where there is none, and where its file is not a preset's."""
    if name not in names():
        raise ConfigError(f"no preset {name!r}; there are {', '.join(names())}")
    path = FOLDER / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Preset)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path.name} is not a preset: {error}") from error
