"""Read what was measured of a model's quality: a JSON file in its folder, or beside its GGUF file."""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from ridgeline.core.config import Choice
from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.jsonfile import read_json_object

QUALITY_FILE = "ridgeline_quality.json"
AS_STORED = "as stored"  # beside the names of schemes: matrices of integers that the files hold
MAX_INPUT_COST = 0.05  # bits per token that 8-bit inputs may cost, at the upper end of the 95 % interval

Name = Annotated[str, msgspec.Meta(max_length=1000)]


class Figure(msgspec.Struct):
    """A mean in bits per token and its standard error, None where one text alone was measured."""

    mean: float
    standard_error: float | None = None

    @property
    def upper(self) -> float:
        """The upper end of the 95 % interval."""
        return self.mean + 1.96 * (self.standard_error or 0.0)

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return f"{self.mean:.4f}{error} bits per token"


class _Base(msgspec.Struct):
    name: Name


class _Comparison(msgspec.Struct):
    num_tokens: int
    kl: Figure


class Quality(msgspec.Struct):
    """Holds what was found beside `base`, where that was measured, and what 8-bit inputs cost beside 16-bit ones.

    `inputs` has their KL by the name of a scheme, or AS_STORED.
    """

    base: _Base | None = None
    comparison: _Comparison | None = None
    inputs: dict[str, Figure] = {}

    def described(self) -> Choice | None:
        """Return the measured quality in words, and of what it was measured."""
        if self.base is None or self.comparison is None:
            return None
        return Choice(f"KL {self.comparison.kl}", f"to {self.base.name}, of {self.comparison.num_tokens:,} tokens")


def quality_path(model: Path) -> Path:
    """Return where the quality of a folder or of a GGUF file is stored."""
    return model / QUALITY_FILE if model.is_dir() else model.with_name(f"{model.name}.{QUALITY_FILE}")


def read_quality(model: Path) -> Quality:
    """Read what was measured of a folder or a GGUF file, maybe nothing. Raises ModelLoadError for a broken file."""
    path = quality_path(model)
    try:
        document: dict[str, Any] = read_json_object(path) if path.exists() else {}
        return msgspec.convert(document, Quality)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{path}: {error}; delete it, or measure the model again") from error
