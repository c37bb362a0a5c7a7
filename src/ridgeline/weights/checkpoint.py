"""Checkpoint: the tensors of a model folder by their names on disk, memory-mapped from safetensors.

Called by loader.py. Knows nothing of models. The official safetensors library parses and checks the headers.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.jsonfile import read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is and what its header says; `dtype` is safetensors' spelling (F32, BF16, ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a folder. Opening reads headers only."""

    path: Path
    entries: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Raises ModelLoadError for a missing, broken or inconsistent file, naming it."""
        entries: dict[str, TensorEntry] = {}
        expected = _index(folder)
        for file in _files(folder, expected):
            for name, entry in _headers(file):
                if name in entries:
                    raise ModelLoadError(
                        f"{folder}: tensor {name!r} is in {entries[name].file.name} and in {file.name}"
                    )
                entries[name] = entry
        for name, shard in expected.items():
            if name not in entries or entries[name].file.name != shard:
                raise ModelLoadError(f"{folder / INDEX} says that {name!r} is in {shard}, and it is not")
        return cls(folder, entries)

    @classmethod
    def of_file(cls, file: Path) -> "Checkpoint":
        """The tensors of one safetensors file. Raises ModelLoadError for a broken one."""
        return cls(file.parent, dict(_headers(file)))

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, file by file: views of the mapped file, private to this process (writes are not saved)."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].file, []).append(name)
        for file, members in by_file.items():
            with _opened(file) as tensors:
                for name in members:
                    yield name, tensors.get_tensor(name)


def _index(folder: Path) -> Mapping[str, str]:
    """Tensor name -> shard file name; empty where the folder has no index."""
    path = folder / INDEX
    if not path.exists() or (folder / SINGLE).exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map must be an object that names a shard file for every tensor")
    result: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not isinstance(name, str) or not shard.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path}: {str(name)[:100]!r} names {str(shard)[:100]!r}, which is no .safetensors file"
            )
        if PurePosixPath(shard).name != shard or "\\" in shard or "\0" in shard:
            raise ModelLoadError(f"{path}: shard {shard[:100]!r} is not a plain file name within the folder")
        result[name] = shard
    return result


def _files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    if index:
        return [folder / shard for shard in sorted(set(index.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelLoadError(f"{folder} has {len(found)} .safetensors files and no {INDEX}; which belong together?")
    other = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_FORMATS)
    if other:
        raise ModelLoadError(
            f"{folder} has weights only as {', '.join(other[:3])}; convert them to safetensors, for example with "
            "transformers' save_pretrained"
        )
    raise ModelLoadError(f"{folder} has no weights: {SINGLE} or {INDEX} is missing")


def _headers(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    with _opened(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            header = tensors.get_slice(name)
            yield name, TensorEntry(file, tuple(header.get_shape()), header.get_dtype())


@contextmanager
def _opened(file: Path) -> Generator[safe_open]:
    if not file.is_file():
        raise ModelLoadError(f"{file} is missing or is not a regular file; download the model again")
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file} is not a valid safetensors file: {str(error)[:200]}; download it again"
        ) from error
