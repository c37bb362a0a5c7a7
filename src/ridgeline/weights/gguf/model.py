"""A GGUF file, or the files of a split one, as a model: its config, its metadata, and where its tensors are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.spec import gguf
from ridgeline.spec.families import read_spec
from ridgeline.weights.gguf.reader import GgufFile, GgufTensor

MAX_SPLITS = 1000
MAX_FACTORS = 1024
SPLIT_NAME = re.compile(r"(.+)-00001-of-([0-9]{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """An opened file, or all files of a split one. `config` is what config.json would say."""

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    architecture: str
    config: Mapping[str, object]

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        """Open a model. Raises ModelLoadError for a broken or hostile file, or a model that is not supported."""
        file = GgufFile.open(path)
        others = [GgufFile.open(other) for other in _other_splits(file)]
        tensors = dict(file.tensors)
        for other in others:
            for name, tensor in other.tensors.items():
                if name in tensors:
                    raise ModelLoadError(f"{other.path}: tensor {name[:80]!r} is also in {tensors[name].file.name}")
                tensors[name] = tensor
        found = len(tensors)
        if (expected := file.metadata.get("split.tensors.count", found)) != found:
            raise ModelLoadError(f"{path}: split.tensors.count is {expected}, but the files have {found} tensors")
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelLoadError(f"{path}: general.architecture is missing or no text; it is no model")
        try:
            config = _read_config(architecture, file.metadata, tensors)
            read_spec(config)
        except ConfigError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        files = (path, *(other.path for other in others))
        return cls(path, files, file.metadata, tensors, architecture, config)


def _other_splits(first: GgufFile) -> list[Path]:
    """Return the files beside the first one of a split model. Raises ModelLoadError for any file but the first."""
    count, number = first.metadata.get("split.count", 1), first.metadata.get("split.no", 0)
    if count in (0, 1) and number == 0:
        return []
    match = SPLIT_NAME.fullmatch(first.path.name)
    if number != 0 or not isinstance(count, int) or not 1 < count <= MAX_SPLITS or not match or int(match[2]) != count:
        which = f"number {str(number)[:20]} of {str(count)[:20]} files"
        raise ModelLoadError(f"{first.path} is {which}; give the first one, whose name ends in -00001-of-<count>.gguf")
    return [first.path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]


def _read_config(
    architecture: str, metadata: Mapping[str, object], tensors: Mapping[str, GgufTensor]
) -> dict[str, object]:
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for name in set(gguf.FACTOR_TENSORS) & set(tensors):
        tensor = tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
            raise ConfigError(f"tensor {name} must be a list of at most {MAX_FACTORS} F32 numbers")
        own[name] = tensor.read().view(np.float32).tolist()
    config = gguf.read_config(architecture, own, {name: tensor.shape for name, tensor in tensors.items()})
    by_type: dict[str, int] = {}
    for tensor in tensors.values():
        by_type[tensor.type.name] = by_type.get(tensor.type.name, 0) + tensor.num_bytes
    most = max(by_type, key=lambda kind: by_type[kind])
    return config | {"dtype": "float32" if most == "F32" else "bfloat16"}
