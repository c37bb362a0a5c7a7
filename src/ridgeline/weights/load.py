"""Turn checkpoint tensors into program weights, whole or in part, decoded or as they are stored.

Called by backends and the trainer. What a checkpoint of any format stores as small numbers is read without decoding by
backends whose kernels compute with it, where nobody asked for another quantization.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ridgeline.core.dtypes import FLOAT32, Array, all_finite, assign, contiguous, equal, float32, to_dtype
from ridgeline.core.errors import ModelLoadError
from ridgeline.program.op import Program
from ridgeline.program.opset import float32_weights
from ridgeline.quant.stored import StoredFormat, StoredMatrix, joined
from ridgeline.spec import families
from ridgeline.spec.spec import DecoderSpec, Rename
from ridgeline.weights.checkpoint import FLOATS, WHOLE, Checkpoint
from ridgeline.weights.folder import QUANTIZATION, ModelFolder
from ridgeline.weights.formats import PackedCheckpoint, unpacked
from ridgeline.weights.renames import Source, expand, followed, spelled_as_in

# Buffers that old checkpoints carry: rotary frequencies and causal masks, both computed here.
IGNORED_SUFFIXES = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    *(".k_scale", ".v_scale", ".q_scale"),  # of another program's fp8 cache; keys and values are cached as asked for
)
MAX_LISTED = 10


if TYPE_CHECKING:
    from ridgeline.weights.gguf.tensors import GgufCheckpoint

Tensors: TypeAlias = "Checkpoint | PackedCheckpoint | GgufCheckpoint"
"""A checkpoint as it is read: `entries` by name, and `read` of ranges of one, whatever it is stored as.

All but a plain one have matrices of small numbers: `format_of` one, and rows of its `matrix`.
"""


def load_weights(
    folder: ModelFolder | Path, spec: DecoderSpec, program: Program, dtype: np.dtype[Any]
) -> dict[str, Array]:
    """Return every weight of `program` in `dtype`, or in float32 where its op says so, shaped as the program says.

    A tensor stored in `dtype` stays a view of the mapped file; others are converted one at a time. Raises
    ModelLoadError that lists all missing, unexpected and misshapen tensors, ConfigError for an unknown quantization.
    """
    return dict(StreamedWeights(folder, spec, program, dtype))


class StreamedWeights(Mapping[str, Array]):
    """As `load_weights`, each weight read anew whenever it is asked for: memory holds what the caller keeps.

    `formats` has the weights that are stored as small numbers, which `matrix` reads without decoding. One of experts
    [E, N, K] is E matrices of one format; one that is stored turned around, with inputs as rows, is not among them.
    """

    def __init__(self, folder: ModelFolder | Path, spec: DecoderSpec, program: Program, dtype: np.dtype[Any]) -> None:
        self.checkpoint, self._sources = open_checkpoint(folder, spec, program, dtype)
        self.program = program
        found = {} if isinstance(self.checkpoint, Checkpoint) else _formats(self.checkpoint, self._sources)
        self.formats: Mapping[str, StoredFormat] = found
        self._dtypes = dict.fromkeys(program.weights, dtype) | dict.fromkeys(float32_weights(program), FLOAT32)

    def __getitem__(self, name: str) -> Array:
        return self.rows(name, slice(None))

    def __iter__(self) -> Iterator[str]:
        return iter(self.program.weights)

    def __len__(self) -> int:
        return len(self.program.weights)

    def rows(self, name: str, part: slice) -> Array:
        """Return the outputs `part` of a weight: rows of a matrix or a vector, or of every matrix of a stack.

        What is stored as plain numbers is read from the file where these are, and nowhere else.
        """
        dtype, sources = self._dtypes[name], self._sources[name]
        if sources[0][1].expert is None:
            return contiguous(to_dtype(self._read(*sources[0], name, part), dtype))
        pieces = (self._read(stored, source, name, part) for stored, source in sources)
        first = next(pieces)
        stack = np.empty((len(sources), *first.shape), dtype)
        assign(stack[0], first)
        for expert, piece in enumerate(pieces, start=1):
            assign(stack[expert], piece)
        return stack

    def tensors(self, name: str) -> Sequence[str]:
        """Return the names in the checkpoint of the tensors that hold a weight."""
        return [stored for stored, _ in self._sources[name]]

    def matrix(self, name: str, expert: int = 0, part: slice = slice(None)) -> StoredMatrix:
        """Return rows of one of `formats`, or of one expert of it. Raises ModelLoadError for a damaged tensor."""
        return self.matrix_rows(name, expert)(part)

    def matrix_rows(self, name: str, expert: int = 0) -> Callable[[slice], StoredMatrix]:
        """Return `matrix` of any rows, whose file stays mapped as long as that lives."""
        assert not isinstance(self.checkpoint, Checkpoint), "a plain checkpoint has no stored matrices"
        found, entries = self._sources[name], self.checkpoint.entries
        stored, source = found[0] if len(found) == 1 else found[expert]
        is_stack = source.rename.experts and source.expert is None
        read = self.checkpoint.matrix(stored, expert if is_stack else None)

        def rows_of(part: slice) -> StoredMatrix:
            matrix = joined([read(some) for some in source.rows(self.program, name, part)])
            for numbers in (matrix.scales, matrix.minima):
                if numbers is not None and not np.isfinite(numbers).all():
                    what = f"{entries[stored].file}: tensor {stored!r}: a scale is NaN or infinite"
                    raise ModelLoadError(f"{what}; the file is damaged")
            return matrix

        return rows_of

    def _read(self, stored: str, source: Source, target: str, part: slice) -> Array:
        rows = source.rows(self.program, target, part)
        array = self.checkpoint.read(stored, source.stored_row_dim, rows)
        if not all_finite(array):
            file = self.checkpoint.entries[stored].file
            raise ModelLoadError(f"{file}: tensor {stored!r} has NaN or infinity; the file is damaged")
        return source.arranged(array)


def prequantized(folder: ModelFolder, spec: DecoderSpec, program: Program) -> StreamedWeights | None:
    """Return the weights of a model folder that stores some as small numbers; None for any other.

    Raises what `load_weights` raises for a checkpoint that does not fit the program.
    """
    if folder.gguf is None and folder.config.get(QUANTIZATION) is None:
        return None
    weights = StreamedWeights(folder, spec, program, FLOAT32)
    return weights if weights.formats else None


def _formats(
    checkpoint: "PackedCheckpoint | GgufCheckpoint", sources: Mapping[str, Sequence[tuple[str, Source]]]
) -> dict[str, StoredFormat]:
    """Return the format of every weight all of whose tensors are stored alike, as small numbers."""
    formats: dict[str, StoredFormat] = {}
    for target, found in sources.items():
        turned = any(source.rename.transpose or source.rename.depthwise for _, source in found)
        forms = {None if turned else checkpoint.format_of(name) for name, _ in found}
        if len(forms) == 1 and (form := forms.pop()) is not None:
            formats[target] = form
    return formats


def open_checkpoint(
    folder: ModelFolder | Path, spec: DecoderSpec, program: Program, dtype: np.dtype[Any]
) -> tuple[Tensors, Mapping[str, Sequence[tuple[str, Source]]]]:
    """Return the checkpoint, found to hold the program's weights and no others, and the tensors of each weight.

    What is quantized in it is read as `dtype`.
    """
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder.open(folder)
    if folder.gguf is not None:
        from ridgeline.weights.gguf.tensors import GgufCheckpoint

        checkpoint = GgufCheckpoint(folder.gguf, spec)
        renames = expand(checkpoint.renames, spec)
    else:
        checkpoint = unpacked(Checkpoint.open(folder.path), folder.config, dtype)
        renames = spelled_as_in(checkpoint.entries.keys(), expand(families.renames(spec), spec))
    sources = followed(checkpoint.entries.keys(), renames, program)
    _check(checkpoint, sources, renames, program)
    if spec.head is not None and spec.head.tied and "head.weight" not in program.weights:
        _check_tied(checkpoint, renames)
    by_weight: dict[str, list[tuple[str, Source]]] = {name: [] for name in program.weights}
    for name, source in sources.items():
        for target in source.rename.targets:
            by_weight[target].append((name, source))
    return checkpoint, by_weight


def _check(checkpoint: Tensors, sources: Mapping[str, Source], renames: Sequence[Rename], program: Program) -> None:
    entries = checkpoint.entries
    named = Counter(target for rename in {s.rename for s in sources.values()} for target in rename.targets)
    allowed = set(sources) | {r.source for r in renames if r.targets == ("head.weight",)}  # beside a tied embedding
    others, left_out = entries.keys() - allowed, [rename.source for rename in renames if not rename.targets]
    unread = tuple(start for start in left_out if not any(name.startswith(start) for name in sources))
    present = [name for name in sources if name in entries]
    shapes = {name: (entries[name].shape, sources[name].shape(program)) for name in present}
    dtypes = {name: entries[name].dtype for name in present}
    problems = {
        "missing": [name for name in sources if name not in entries],
        "unexpected": [x for x in others if not x.startswith(unread) and not _without_effect(x, checkpoint)],
        "stored in two ways": [name for name, count in named.items() if count > 1],
        "of another shape": [f"{name} {list(a)} instead of {list(b)}" for name, (a, b) in shapes.items() if a != b],
        "of a type other than f32, f16, bf16": [f"{x} {dtypes[x]}" for x in dtypes if dtypes[x] not in FLOATS],
    }
    text = "; ".join(f"{len(found)} {what}: {_listed(sorted(found))}" for what, found in problems.items() if found)
    if text:
        raise ModelLoadError(f"{checkpoint.path}: the tensors do not fit config.json. {text}")


def _without_effect(name: str, checkpoint: Tensors) -> bool:
    """Tell whether a tensor that the model has no place for changes nothing: AutoGPTQ gave every layer a bias, of 0."""
    if name.endswith(IGNORED_SUFFIXES):
        return True
    entry = checkpoint.entries[name]
    may_be_zero = name.endswith(".bias") and len(entry.shape) == 1 and entry.dtype in FLOATS
    return may_be_zero and not checkpoint.read(name, 0, WHOLE).any()


def _check_tied(checkpoint: Tensors, renames: Sequence[Rename]) -> None:
    """Check that a head stored beside a tied embedding is the same matrix; else config.json is wrong."""
    source = {target: rename.source for rename in renames for target in rename.targets}
    names = [source.get("head.weight", ""), source["embed.weight"]]
    if names[0] not in checkpoint.entries:
        return
    head, embedding = (checkpoint.read(name, 0, WHOLE) for name in names)
    embedding = to_dtype(embedding, head.dtype)
    if not equal(head, embedding) and not np.array_equal(float32(head), float32(embedding)):
        what = f"{names[0]} differs from {names[1]}, but config.json ties them"
        raise ModelLoadError(f"{checkpoint.path}: {what}; set tie_word_embeddings to false")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
