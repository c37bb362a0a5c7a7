"""Checkpoint tensors -> program weights, and back. Called by the engine and the trainer.

The only place that knows both spellings of a weight; what the spellings are comes from the family's renames.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.program.op import Program
from ridgeline.spec import families
from ridgeline.spec.spec import DecoderSpec, Rename
from ridgeline.weights.checkpoint import DTYPES, SINGLE, Checkpoint
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.gguf.model import GgufCheckpoint

BASE_PREFIXES = ("model.", "transformer.")  # left out by checkpoints of the model without its head
# Buffers that old checkpoints carry: rotary frequencies and causal masks, both computed here.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
MAX_LISTED = 10

Weights = dict[str, torch.Tensor]
Tensors = Checkpoint | GgufCheckpoint


def load_weights(folder: ModelFolder | Path, spec: DecoderSpec, program: Program, dtype: torch.dtype) -> Weights:
    """Every weight of `program` in `dtype`, shaped as the program says.

    A tensor stored in `dtype` stays a view of the mapped file; others are converted one at a time. Raises
    ModelLoadError that lists all missing, unexpected and misshapen tensors, ConfigError for a quantized model.
    """
    checkpoint, sources = _open(folder, spec, program)
    weights: Weights = {}
    for name, tensor in checkpoint.tensors(list(sources)):
        for target, piece in _pieces(tensor, sources[name], program):
            weights[target] = piece.to(dtype).contiguous()
    return {name: weights[name] for name in program.weights}


class StreamedWeights(Mapping[str, torch.Tensor]):
    """As `load_weights`, each weight read anew whenever it is asked for: memory holds what the caller keeps."""

    def __init__(self, folder: ModelFolder | Path, spec: DecoderSpec, program: Program, dtype: torch.dtype) -> None:
        self._checkpoint, sources = _open(folder, spec, program)
        self._sources = {target: rename for rename in sources.values() for target in rename.targets}
        self._program, self._dtype = program, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        rename = self._sources[name]
        ((_, tensor),) = self._checkpoint.tensors([rename.source])
        return dict(_pieces(tensor, rename, self._program))[name].to(self._dtype).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._program.weights)

    def __len__(self) -> int:
        return len(self._program.weights)


def _open(folder: ModelFolder | Path, spec: DecoderSpec, program: Program) -> tuple[Tensors, Mapping[str, Rename]]:
    """The checkpoint, found to hold the program's weights and no others, and what each of its tensors becomes."""
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder.open(folder)
    if folder.config.get("quantization_config") is not None:
        raise ConfigError(f"{folder.name}: config.json has a quantization_config; this loader reads only plain weights")
    if folder.gguf is not None:
        checkpoint = GgufCheckpoint(folder.gguf, spec)
        renames = checkpoint.renames()
    else:
        checkpoint = Checkpoint.open(folder.path)
        renames = _spelled_as_in(checkpoint, expand(families.family(spec.model_type).renames(spec), spec))
    sources = {r.source: r for r in renames if all(target in program.weights for target in r.targets)}
    _check(checkpoint, sources, renames, program)
    if spec.head.tied:
        _check_tied(checkpoint, renames)
    return checkpoint, sources


def _pieces(tensor: torch.Tensor, rename: Rename, program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """The program's weights that a tensor of the checkpoint holds, one below the other."""
    rows = [program.weights[target][0] for target in rename.targets]
    tensor = tensor.t() if rename.transpose else tensor.squeeze(1) if rename.depthwise else tensor
    return zip(rename.targets, tensor.split(rows), strict=True)


def save_weights(folder: Path, spec: DecoderSpec, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Writes program weights as `model.safetensors` in `dtype`, under the names and shapes of the model's family.

    The file appears whole or not at all.
    """
    tensors: Weights = {}
    written: set[str] = set()
    for rename in expand(families.family(spec.model_type).renames(spec), spec):
        if all(target in weights for target in rename.targets):
            tensor = torch.cat([weights[target].detach().to("cpu", dtype) for target in rename.targets])
            tensor = tensor.t() if rename.transpose else tensor[:, None] if rename.depthwise else tensor
            tensors[rename.source] = tensor.contiguous()
            written.update(rename.targets)
    unnamed = sorted(set(weights) - written)
    if unnamed:
        raise ModelLoadError(f"{spec.model_type} has no tensor name for {_listed(unnamed)}")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (SINGLE + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / SINGLE)


def expand(renames: Sequence[Rename], spec: DecoderSpec) -> Sequence[Rename]:
    """One rename per tensor: `{i}` replaced by every layer number."""
    expanded: list[Rename] = []
    for rename in renames:
        layers = [str(i) for i in range(len(spec.layers))] if "{i}" in rename.source else [""]
        expanded += [
            replace(
                rename,
                source=rename.source.replace("{i}", layer),
                targets=tuple(target.replace("{i}", layer) for target in rename.targets),
            )
            for layer in layers
        ]
    return expanded


def _spelled_as_in(checkpoint: Checkpoint, renames: Sequence[Rename]) -> Sequence[Rename]:
    """The renames without the base model's prefix, where no tensor of the checkpoint has it."""
    if any(name.startswith(BASE_PREFIXES) for name in checkpoint.entries):
        return renames
    return [replace(r, source=r.source.removeprefix("model.").removeprefix("transformer.")) for r in renames]


def _check(checkpoint: Tensors, sources: Mapping[str, Rename], renames: Sequence[Rename], program: Program) -> None:
    entries = checkpoint.entries
    named = Counter(target for rename in sources.values() for target in rename.targets)
    wrong = [name for name in program.weights if named[name] != 1]
    assert not wrong, f"the family's renames must name these exactly once: {wrong}"
    allowed = set(sources) | {r.source for r in renames if r.targets == ("head.weight",)}  # beside a tied embedding
    extra = [name for name in entries if name not in allowed and not name.endswith(IGNORED_SUFFIXES)]
    present = {
        name: (entries[name], _stored_shape(rename, program)) for name, rename in sources.items() if name in entries
    }
    problems = {
        "missing": [name for name in sources if name not in entries],
        "unexpected": extra,
        "of another shape": [
            f"{name} {list(entry.shape)} instead of {list(shape)}"
            for name, (entry, shape) in present.items()
            if entry.shape != shape
        ],
        "of a type other than f32, f16, bf16": [
            f"{name} {entry.dtype}" for name, (entry, _) in present.items() if entry.dtype not in DTYPES
        ],
    }
    text = "; ".join(f"{len(found)} {what}: {_listed(sorted(found))}" for what, found in problems.items() if found)
    if text:
        raise ModelLoadError(f"{checkpoint.path}: the tensors do not fit config.json. {text}")


def _stored_shape(rename: Rename, program: Program) -> tuple[int, ...]:
    shapes = [program.weights[target] for target in rename.targets]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return shape[::-1] if rename.transpose else (shape[0], 1, *shape[1:]) if rename.depthwise else shape


def _check_tied(checkpoint: Tensors, renames: Sequence[Rename]) -> None:
    """A head stored beside a tied embedding must be the same matrix, or config.json is wrong."""
    source = {target: rename.source for rename in renames for target in rename.targets}
    names = [source.get("head.weight", ""), source["embed.weight"]]
    if names[0] not in checkpoint.entries:
        return
    head, embedding = dict(checkpoint.tensors(names)).values()
    if head.shape != embedding.shape or not torch.equal(head, embedding.to(head.dtype)):
        raise ModelLoadError(
            f"{checkpoint.path}: {names[0]} differs from {names[1]}, but config.json ties them; "
            "set tie_word_embeddings to false"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
