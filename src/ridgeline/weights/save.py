"""The program's weights -> model.safetensors, under the names of the model's family. Called by the trainer."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ridgeline.core.dtypes import Array, contiguous, to_dtype
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.spec import families
from ridgeline.spec.spec import DecoderSpec, Rename
from ridgeline.weights.checkpoint import SINGLE
from ridgeline.weights.folder import SETTINGS_FILES, ModelFolder
from ridgeline.weights.quality import QUALITY_FILE
from ridgeline.weights.renames import Source, expand

# What is beside a model's weights and says what they are, or how good: it is not true of others made of them.
NOT_COPIED = ("training.json", *SETTINGS_FILES, QUALITY_FILE)


def save_weights(folder: Path, spec: DecoderSpec, weights: Mapping[str, Array], dtype: np.dtype[Any]) -> None:
    """Write program weights as `model.safetensors` in `dtype`, under the names and shapes of the model's family.

    The file appears whole or not at all. Raises ModelLoadError for a weight that the family has no name for.
    """
    tensors: dict[str, Array] = {}
    written: set[str] = set()
    for rename in expand(families.renames(spec), spec):
        targets = set(rename.targets)
        if targets and targets <= weights.keys() and not targets & written:
            tensors.update(stored_tensors(rename, [to_dtype(weights[target], dtype) for target in rename.targets]))
            written |= targets
    unnamed = sorted(set(weights) - written)
    if unnamed:
        raise ModelLoadError(f"{spec.model_type} has no tensor name for {', '.join(unnamed[:10])}")
    write_tensors(folder / SINGLE, tensors)


def write_checkpoint(model: Path, tensors: Mapping[str, Array], folder: Path) -> None:
    """Write tensors, by their names in a checkpoint, with all that the folder of `model` has beside its weights."""
    if not model.is_dir():
        raise ModelLoadError(f"{model} is one file, and its tensors come with it: give a folder of new weights")
    copy_beside(model, folder)
    write_tensors(folder / SINGLE, {name: contiguous(tensor) for name, tensor in tensors.items()})


def copy_beside(model: Path, folder: Path, *left_out: str) -> None:
    """Copy what a model has beside its weights (config, tokenizer, generation defaults), but `left_out`.

    Those of a GGUF file are made of its metadata.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not model.is_dir():
        for name, text in _beside(ModelFolder.open(model)):
            if name not in left_out:
                (folder / name).write_text(text, encoding="utf-8")
        return
    for file in model.iterdir():
        is_beside = file.suffix in (".json", ".jinja", ".model", ".txt") and ".index." not in file.name
        if is_beside and file.is_file() and file.name not in left_out:
            shutil.copyfile(file, folder / file.name)


def _beside(model: ModelFolder) -> Iterator[tuple[str, str]]:
    """Yield the files of a folder that say what a model says beside its weights."""
    yield "config.json", json.dumps(model.config, indent=2) + "\n"
    said = {key: value for key, value in asdict(model.generation_config).items() if value not in (None, ())}
    ends = {"eos_token_id": said.pop("eos_token_ids")} if "eos_token_ids" in said else {}
    yield "generation_config.json", json.dumps(ends | said, indent=2) + "\n"
    if (tokenizer := model.tokenizer()) is not None:
        yield "tokenizer.json", tokenizer.to_json()
        templates = [{"name": name, "template": source} for name, source in tokenizer.chat_templates.items()]
        about = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens, "chat_template": templates}
        yield "tokenizer_config.json", json.dumps(about, indent=2) + "\n"


def new_folder(out: Path) -> Path:
    """Return where a folder is written until it is whole, beside `out`. Raises ConfigError where `out` is in use."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; give --out another name, or delete it")
    return out.with_name(out.name + ".partial")


def publish(partial: Path, out: Path) -> None:
    """Let a folder that is whole appear under its own name."""
    if out.exists():
        out.rmdir()
    partial.rename(out)


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a file of safetensors, which appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    partial.replace(path)


def stored_tensors(rename: Rename, targets: Sequence[Array]) -> Mapping[str, Array]:
    """Return `targets` under the name or names of `rename`: their rows one after the other within each group."""
    if "{e}" in rename.source:
        each = replace(rename, source="", experts=False)
        experts = enumerate(zip(*targets, strict=True))
        return {rename.source.replace("{e}", str(i)): stored_tensors(each, own)[""] for i, own in experts}
    dim = Source(rename).row_dim
    before, after = targets[0].shape[:dim], targets[0].shape[dim + 1 :]
    parts = [target.reshape(*before, rename.groups, -1, *after) for target in targets]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim + 1)
    tensor = whole.reshape(*before, -1, *after)
    tensor = tensor.swapaxes(-2, -1) if rename.transpose else tensor[:, None] if rename.depthwise else tensor
    return {rename.source: contiguous(tensor)}
