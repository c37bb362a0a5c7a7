"""One file per architecture; the file name is the Hugging Face `model_type`.

A family module declares three functions:

    read(config: ConfigReader) -> DecoderSpec      what the model is; every config key understood or refused
    renames(spec: DecoderSpec) -> Sequence[Rename] how checkpoint tensors become program weights
    tiny(choose: Choose) -> dict[str, object]      a random small config, for the contract tests

Adding an architecture is adding a file here: the registry scans this folder.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from ridgeline.core.errors import ConfigError
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename
from ridgeline.spec.tiny import Choose


class Family(Protocol):
    """What a family module provides."""

    def read(self, config: ConfigReader) -> DecoderSpec: ...

    def renames(self, spec: DecoderSpec) -> Sequence[Rename]: ...

    def tiny(self, choose: Choose) -> dict[str, object]: ...


def names() -> list[str]:
    """All supported values of `model_type`."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def family(model_type: str) -> Family:
    """The family module of `model_type`. Raises ConfigError naming what is supported."""
    if model_type not in names():
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {', '.join(names())}")
    return cast("Family", importlib.import_module(f"{__name__}.{model_type}"))


def read_spec(config: Mapping[str, object]) -> DecoderSpec:
    """config.json as a DecoderSpec. Raises ConfigError for an unknown model_type, key or value."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json: model_type is missing; is this a Hugging Face model folder?")
    reader = ConfigReader(config)
    spec = family(model_type).read(reader)
    reader.finish()
    return spec
