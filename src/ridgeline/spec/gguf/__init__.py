"""Read what a GGUF file says of a model, in this project's terms: one file of `architectures/` per
general.architecture, named after it with underscores for hyphens.

An architecture module declares a function, and a second one where its tensors are not named as Llama's:

    config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]   the config.json that a family reads
    tensors(spec: DecoderSpec) -> Sequence[Stored]                        how its tensors become program weights

`metadata` are the architecture's own keys without its name; the frequency divisors that some files keep as tensors are
beside them as lists of numbers, under the tensors' names. Called by weights/gguf. Imports nothing but spec and core.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from ridgeline.core.errors import ConfigError
from ridgeline.spec.gguf import architectures
from ridgeline.spec.gguf.common import FACTOR_TENSORS, Shapes, Stored, expert_tensors, fused_qkv, llama_tensors
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec

__all__ = ["FACTOR_TENSORS", "Architecture", "Shapes", "Stored", "architecture", "names", "read_config", "tensors"]


class Architecture(Protocol):
    """The functions that every architecture module has."""

    def config(self, metadata: ConfigReader, shapes: Shapes) -> dict[str, object]: ...


def names() -> list[str]:
    """Return all supported values of general.architecture, with underscores for hyphens."""
    return sorted(module.name for module in pkgutil.iter_modules(architectures.__path__))


def architecture(name: str) -> Architecture:
    """Return the module of an architecture. Raises ConfigError naming what is supported."""
    module = name.replace("-", "_")
    if module not in names():
        raise ConfigError(f"general.architecture {name[:80]!r} is not supported; supported: {', '.join(names())}")
    return cast("Architecture", importlib.import_module(f"{architectures.__name__}.{module}"))


def tensors(name: str, spec: DecoderSpec) -> Sequence[Stored]:
    """Return how the tensors of architecture `name` become the program's weights: as it says, else as in Llama."""
    own = cast("Callable[[DecoderSpec], Sequence[Stored]] | None", getattr(architecture(name), "tensors", None))
    return own(spec) if own else [*llama_tensors(), *fused_qkv(), *expert_tensors()]


def read_config(name: str, metadata: Mapping[str, object], shapes: Shapes) -> dict[str, object]:
    """Return the config.json of architecture `name` with these metadata and tensors.

    Raises ConfigError for an unknown architecture, key or value: what is not understood is refused, never dropped.
    """
    reader = ConfigReader(metadata, name)
    config = architecture(name).config(reader, shapes)
    reader.finish()
    return config
