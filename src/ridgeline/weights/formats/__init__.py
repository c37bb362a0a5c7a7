"""How checkpoints store quantized weights: one file per format, named after config.json's `quant_method`.

A module declares one function:

    find(entries, settings) -> Sequence[PackedTensor]     what in a checkpoint with these tensors is stored that way

`settings` reads the quantization_config; the format takes from it what it understands, and what is left over is an
error. Called by loader.py, which then sees the model's tensors as if they were stored plainly.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from ridgeline.core.errors import ConfigError
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import Checkpoint, TensorEntry

Decode = Callable[[Sequence[torch.Tensor], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of the model that is stored as several, such as small numbers and their scales.

    `name` is what renames call it. `decode` takes the stored tensors `parts` and a dtype and returns [*shape].
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    decode: Decode


class Format(Protocol):
    """What a module of this folder provides."""

    def find(self, entries: Mapping[str, TensorEntry], settings: ConfigReader) -> Sequence[PackedTensor]:
        """All packed tensors among `entries`. Raises ModelLoadError where parts are missing or do not fit together."""
        ...


class DecodedCheckpoint:
    """A checkpoint's tensors as the model has them: packed ones under one name, decoded whenever they are asked for.

    As `weights.checkpoint.Checkpoint`; what is packed becomes `dtype`.
    """

    def __init__(self, stored: Checkpoint, packed: Sequence[PackedTensor], dtype: torch.dtype) -> None:
        self.path = stored.path
        self._stored, self._dtype = stored, dtype
        self._packed = {tensor.name: tensor for tensor in packed}
        parts = {part for tensor in packed for part in tensor.parts}
        self.entries: Mapping[str, TensorEntry] = {
            **{name: entry for name, entry in stored.entries.items() if name not in parts},
            **{t.name: TensorEntry(stored.entries[t.parts[0]].file, t.shape, "F32") for t in packed},
        }

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors in any order, one in memory at a time."""
        yield from self._stored.tensors([name for name in names if name not in self._packed])
        for name in names:
            if name in self._packed:
                packed = self._packed[name]
                parts = dict(self._stored.tensors(list(packed.parts)))
                yield name, packed.decode([parts[part] for part in packed.parts], self._dtype)


def names() -> list[str]:
    """All supported values of `quant_method`."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def decoded(checkpoint: Checkpoint, config: Mapping[str, object], dtype: torch.dtype) -> Checkpoint | DecodedCheckpoint:
    """The checkpoint as config.json's quantization_config says that it is stored, decoded to `dtype`.

    Raises ConfigError for a method or a setting that is not known, ModelLoadError for parts that do not fit together.
    """
    settings = ConfigReader(config).section("quantization_config")
    if settings is None:
        return checkpoint
    method = settings.text("quant_method")
    if method not in names():
        raise ConfigError(
            f"{checkpoint.path}: quantization_config has quant_method {method!r}, which is not supported; "
            f"supported: {', '.join(names())}"
        )
    found = cast("Format", importlib.import_module(f"{__name__}.{method}")).find(checkpoint.entries, settings)
    settings.finish()
    return DecodedCheckpoint(checkpoint, found, dtype)
