"""Read what a GGUF file says of a model, in this project's terms: `architecture_table.py` has a row per architecture.

`metadata` are the architecture's own keys without its name; the frequency divisors that some files keep as tensors are
beside them as lists of numbers, under the tensors' names. Called by weights/gguf. Imports nothing but spec and core.
"""

from collections.abc import Mapping, Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.gguf.architecture_table import ARCHITECTURES, Architecture
from ridgeline.spec.gguf.common import FACTOR_TENSORS, Shapes, Stored
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec

__all__ = ["FACTOR_TENSORS", "Shapes", "Stored", "names", "read_config", "tensors"]


def names() -> list[str]:
    """Return all supported values of general.architecture, with underscores for hyphens."""
    return sorted(ARCHITECTURES)


def _architecture(name: str) -> Architecture:
    found = ARCHITECTURES.get(name.replace("-", "_"))
    if found is None:
        raise ConfigError(f"general.architecture {name[:80]!r} is not supported; supported: {', '.join(names())}")
    return found


def tensors(name: str, spec: DecoderSpec) -> Sequence[Stored]:
    """Return how the tensors of architecture `name` become the program's weights."""
    return _architecture(name).tensors(spec)


def read_config(name: str, metadata: Mapping[str, object], shapes: Shapes) -> dict[str, object]:
    """Return the config.json of architecture `name` with these metadata and tensors.

    Raises ConfigError for an unknown architecture, key or value: what is not understood is refused, never dropped.
    """
    reader = ConfigReader(metadata, name)
    config = _architecture(name).config(reader, shapes)
    reader.finish()
    return config
