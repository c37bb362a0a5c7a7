"""Checkpoint tensors -> program weights, and back. Called by the engine and the trainer.

The only place that knows both spellings of a weight; what the spellings are comes from the family's renames.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from ridgeline.core.errors import ModelLoadError
from ridgeline.program.op import Program
from ridgeline.program.opset import float32_weights
from ridgeline.spec import families
from ridgeline.spec.spec import DecoderSpec, MixtureOfExperts, Rename
from ridgeline.weights.checkpoint import DTYPES, SINGLE, Checkpoint
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.formats import DecodedCheckpoint, decoded
from ridgeline.weights.gguf.tensors import GgufCheckpoint

BASE_PREFIXES = ("model.", "transformer.", "gpt_neox.")  # left out by checkpoints of the model without its head
# Buffers that old checkpoints carry: rotary frequencies and causal masks, both computed here.
IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)
MAX_LISTED = 10

Weights = dict[str, torch.Tensor]
Tensors = Checkpoint | DecodedCheckpoint | GgufCheckpoint


@dataclass(frozen=True, slots=True)
class _Stored:
    """What one tensor of the checkpoint is: all that `rename` names, or expert number `expert` of it."""

    rename: Rename
    expert: int | None = None


def load_weights(folder: ModelFolder | Path, spec: DecoderSpec, program: Program, dtype: torch.dtype) -> Weights:
    """Every weight of `program` in `dtype`, or in float32 where its op says so, shaped as the program says.

    A tensor stored in `dtype` stays a view of the mapped file; others are converted one at a time. Raises
    ModelLoadError that lists all missing, unexpected and misshapen tensors, ConfigError for an unknown quantization.
    """
    checkpoint, stored = _open(folder, spec, program, dtype)
    weights = _read(checkpoint, stored, program, set(program.weights), _dtypes(program, dtype))
    return {name: weights[name] for name in program.weights}


class StreamedWeights(Mapping[str, torch.Tensor]):
    """As `load_weights`, each weight read anew whenever it is asked for: memory holds what the caller keeps."""

    def __init__(self, folder: ModelFolder | Path, spec: DecoderSpec, program: Program, dtype: torch.dtype) -> None:
        self._checkpoint, stored = _open(folder, spec, program, dtype)
        self._sources: dict[str, dict[str, _Stored]] = {}
        for name, tensor in stored.items():
            for target in tensor.rename.targets:
                self._sources.setdefault(target, {})[name] = tensor
        self._program, self._dtypes = program, _dtypes(program, dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        return _read(self._checkpoint, self._sources[name], self._program, {name}, self._dtypes)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._program.weights)

    def __len__(self) -> int:
        return len(self._program.weights)


def _open(
    folder: ModelFolder | Path, spec: DecoderSpec, program: Program, dtype: torch.dtype
) -> tuple[Tensors, Mapping[str, _Stored]]:
    """The checkpoint, found to hold the program's weights and no others, and what each of its tensors is."""
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder.open(folder)
    if folder.gguf is not None:
        checkpoint = GgufCheckpoint(folder.gguf, spec)
        renames = expand(checkpoint.renames, spec)
    else:
        checkpoint = decoded(Checkpoint.open(folder.path), folder.config, dtype)
        renames = _spelled_as_in(checkpoint, expand(families.family(spec.model_type).renames(spec), spec))
    followed = _followed(checkpoint, renames, program)
    stored = {name: tensor for rename in followed for name, tensor in _names(rename, program)}
    _check(checkpoint, stored, renames, program)
    if spec.head is not None and spec.head.tied and "head.weight" not in program.weights:
        _check_tied(checkpoint, renames)
    return checkpoint, stored


def _followed(checkpoint: Tensors, renames: Sequence[Rename], program: Program) -> Sequence[Rename]:
    """Of the renames of each weight of the program the first that the checkpoint follows, or simply the first."""
    candidates: dict[str, list[Rename]] = {name: [] for name in program.weights}
    for rename in renames:
        if all(target in candidates for target in rename.targets):
            for target in rename.targets:
                candidates[target].append(rename)
    unnamed = [name for name, found in candidates.items() if not found]
    assert not unnamed, f"the family's renames must name these: {unnamed}"

    def follows(rename: Rename) -> bool:
        return any(name in checkpoint.entries for name, _ in _names(rename, program))

    chosen = [next(filter(follows, found), found[0]) for found in candidates.values()]
    return list(dict.fromkeys(chosen))


def _names(rename: Rename, program: Program) -> Iterator[tuple[str, _Stored]]:
    """The tensors of the checkpoint that together are what `rename` names."""
    if "{e}" not in rename.source:
        yield rename.source, _Stored(rename)
        return
    for expert in range(program.weights[rename.targets[0]][0]):
        yield rename.source.replace("{e}", str(expert)), _Stored(rename, expert)


def _read(
    checkpoint: Tensors,
    stored: Mapping[str, _Stored],
    program: Program,
    wanted: Set[str],
    dtypes: Mapping[str, torch.dtype],
) -> Weights:
    """The weights `wanted` in their `dtypes`, of which `stored` names all parts."""
    weights: Weights = {}
    for name, tensor in checkpoint.tensors(list(stored)):
        expert = stored[name].expert
        for target, piece in _pieces(tensor, stored[name], program):
            if target not in wanted:
                continue
            if expert is None:
                weights[target] = piece.to(dtypes[target]).contiguous()
            else:
                if target not in weights:
                    weights[target] = torch.empty(program.weights[target], dtype=dtypes[target])
                weights[target][expert] = piece
    return weights


def _dtypes(program: Program, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Of every weight, for a model in `dtype`."""
    return dict.fromkeys(program.weights, dtype) | dict.fromkeys(float32_weights(program), torch.float32)


def cut_rows(rename: Rename, tensor: torch.Tensor, program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """Rows for each output of the layer `rename.source`, given to the weights that the layer's rows become."""
    rows_only = replace(rename, transpose=False)
    return _pieces(tensor, _Stored(rows_only), program)


def _pieces(tensor: torch.Tensor, stored: _Stored, program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """The program's weights, or one expert of each, that a tensor of the checkpoint holds."""
    rename, dim = stored.rename, _row_dim(stored)
    rows = [shape[dim] // rename.groups for shape in _target_shapes(stored, program)]
    tensor = tensor.transpose(-2, -1) if rename.transpose else tensor.squeeze(1) if rename.depthwise else tensor
    pieces = tensor.unflatten(dim, (rename.groups, -1)).split(rows, dim + 1)
    return zip(rename.targets, (piece.flatten(dim, dim + 1) for piece in pieces), strict=True)


def _row_dim(stored: _Stored) -> int:
    """The dimension along which several targets share a tensor."""
    return 1 if stored.rename.experts and stored.expert is None else 0


def _target_shapes(stored: _Stored, program: Program) -> Sequence[tuple[int, ...]]:
    shapes = [program.weights[target] for target in stored.rename.targets]
    return shapes if stored.expert is None else [shape[1:] for shape in shapes]


def save_weights(folder: Path, spec: DecoderSpec, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Writes program weights as `model.safetensors` in `dtype`, under the names and shapes of the model's family.

    The file appears whole or not at all.
    """
    tensors: Weights = {}
    written: set[str] = set()
    for rename in expand(families.family(spec.model_type).renames(spec), spec):
        if (
            rename.targets
            and all(target in weights for target in rename.targets)
            and written.isdisjoint(rename.targets)
        ):
            tensors.update(
                _stored_tensors(rename, [weights[target].detach().to("cpu", dtype) for target in rename.targets])
            )
            written.update(rename.targets)
    unnamed = sorted(set(weights) - written)
    if unnamed:
        raise ModelLoadError(f"{spec.model_type} has no tensor name for {_listed(unnamed)}")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (SINGLE + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / SINGLE)


def _stored_tensors(rename: Rename, targets: Sequence[torch.Tensor]) -> Weights:
    """What `_pieces` takes apart: `targets` under the name or names of `rename`."""
    if "{e}" in rename.source:
        each = replace(rename, source="", experts=False)
        return {
            rename.source.replace("{e}", str(expert)): _stored_tensors(each, experts)[""]
            for expert, experts in enumerate(zip(*targets, strict=True))
        }
    dim = _row_dim(_Stored(rename))
    parts = [target.unflatten(dim, (rename.groups, -1)) for target in targets]
    tensor = torch.cat(parts, dim + 1).flatten(dim, dim + 1)
    tensor = tensor.transpose(-2, -1) if rename.transpose else tensor[:, None] if rename.depthwise else tensor
    return {rename.source: tensor.contiguous()}


def expand(renames: Sequence[Rename], spec: DecoderSpec) -> Sequence[Rename]:
    """The renames of every layer, `{i}` replaced by its number; `experts` only where a layer has experts.

    There they take the place of others with the same targets, which are those of a dense feed-forward.
    """
    expanded: list[Rename] = []
    for rename in renames:
        if "{i}" not in rename.source:
            expanded.append(rename)
            continue
        expanded += [
            replace(
                rename,
                source=rename.source.replace("{i}", str(i)),
                targets=tuple(target.replace("{i}", str(i)) for target in rename.targets),
            )
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.feed_forward, MixtureOfExperts) or not rename.experts
        ]
    stacks = {target for rename in expanded if rename.experts for target in rename.targets}
    return [rename for rename in expanded if rename.experts or stacks.isdisjoint(rename.targets)]


def _spelled_as_in(checkpoint: Tensors, renames: Sequence[Rename]) -> Sequence[Rename]:
    """The renames without the base model's prefix, where no tensor of the checkpoint has it."""
    if any(name.startswith(BASE_PREFIXES) for name in checkpoint.entries):
        return renames
    return [replace(rename, source=_without_base(rename.source)) for rename in renames]


def _without_base(source: str) -> str:
    return next((source.removeprefix(base) for base in BASE_PREFIXES if source.startswith(base)), source)


def _check(checkpoint: Tensors, stored: Mapping[str, _Stored], renames: Sequence[Rename], program: Program) -> None:
    entries = checkpoint.entries
    followed = {tensor.rename for tensor in stored.values()}
    named = Counter(target for rename in followed for target in rename.targets)
    allowed = set(stored) | {r.source for r in renames if r.targets == ("head.weight",)}  # beside a tied embedding
    unread = tuple(rename.source for rename in renames if not rename.targets)
    present = {
        name: (entries[name], _stored_shape(tensor, program)) for name, tensor in stored.items() if name in entries
    }
    problems = {
        "missing": [name for name in stored if name not in entries],
        "unexpected": [
            name
            for name in entries
            if name not in allowed and not name.startswith(unread) and not name.endswith(IGNORED_SUFFIXES)
        ],
        "stored in two ways": [name for name, count in named.items() if count > 1],
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


def _stored_shape(stored: _Stored, program: Program) -> tuple[int, ...]:
    shapes, dim = _target_shapes(stored, program), _row_dim(stored)
    rows = sum(shape[dim] for shape in shapes)
    shape = (*shapes[0][:dim], rows, *shapes[0][dim + 1 :])
    if stored.rename.transpose:
        return (*shape[:-2], shape[-1], shape[-2])
    return (shape[0], 1, *shape[1:]) if stored.rename.depthwise else shape


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
