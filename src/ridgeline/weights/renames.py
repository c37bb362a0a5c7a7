"""Which tensors of a checkpoint are which weights of the program, down to ranges of rows. Pure: no files are read."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.core.dtypes import Array
from ridgeline.program.op import Program
from ridgeline.spec.spec import DecoderSpec, MixtureOfExperts, Rename

BASE_PREFIXES = ("model.", "transformer.", "gpt_neox.")  # left out by checkpoints of the model without its head


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a checkpoint: all that `rename` names, or part number `expert` of its stacked targets.

    A weight's rows are its outputs: dimension 0, or 1 of a stack. Targets that share a tensor share its rows.
    """

    rename: Rename
    expert: int | None = None

    @property
    def row_dim(self) -> int:
        """The dimension of the rows, as the program has them."""
        return 1 if self.rename.experts and self.expert is None else 0

    @property
    def stored_row_dim(self) -> int:
        """The dimension of the rows in the checkpoint's tensor."""
        return self.row_dim + 1 if self.rename.transpose else self.row_dim

    def shape(self, program: Program) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor."""
        shapes, dim = self._target_shapes(program), self.row_dim
        shape = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
        if self.rename.transpose:
            return (*shape[:-2], shape[-1], shape[-2])
        return (shape[0], 1, *shape[1:]) if self.rename.depthwise else shape

    def rows(self, program: Program, target: str, part: slice) -> Sequence[slice]:
        """Return the rows of the checkpoint's tensor that are the rows `part` of `target`, in order."""
        groups, index = self.rename.groups, self.rename.targets.index(target)
        sizes = [shape[self.row_dim] // groups for shape in self._target_shapes(program)]
        size, begin, step = sizes[index], sum(sizes[:index]), sum(sizes)
        first, end, _ = part.indices(size * groups)
        if size == 1:
            return [slice(begin + first * step, begin + (end - 1) * step + 1, step)]
        places = ((group * step + begin, group * size) for group in range(first // size, -(-end // size)))
        return [slice(at + max(first - before, 0), at + min(end - before, size)) for at, before in places]

    def arranged(self, stored: Array) -> Array:
        """Return rows of the checkpoint's tensor as the program has them."""
        if self.rename.transpose:
            return stored.swapaxes(-2, -1)
        return stored.squeeze(1) if self.rename.depthwise else stored

    def _target_shapes(self, program: Program) -> Sequence[tuple[int, ...]]:
        shapes = [program.weights[target] for target in self.rename.targets]
        return shapes if self.expert is None else [shape[1:] for shape in shapes]


def expand(renames: Sequence[Rename], spec: DecoderSpec) -> Sequence[Rename]:
    """Return the renames of every layer, `{i}` replaced by its number; `experts` only where a layer has experts.

    There they take the place of others with the same targets, which are those of a dense feed-forward.
    """
    expanded: list[Rename] = []
    for rename in renames:
        if "{i}" not in rename.source:
            expanded.append(rename)
            continue
        for number, layer in enumerate(spec.layers):
            if isinstance(layer.feed_forward, MixtureOfExperts) or not rename.experts:
                source, *targets = (name.replace("{i}", str(number)) for name in (rename.source, *rename.targets))
                expanded.append(replace(rename, source=source, targets=tuple(targets)))
    stacks = {target for rename in expanded if rename.experts for target in rename.targets}
    return [rename for rename in expanded if rename.experts or stacks.isdisjoint(rename.targets)]


def spelled_as_in(names: Collection[str], renames: Sequence[Rename]) -> Sequence[Rename]:
    """Return the renames without the base model's prefix, where no tensor of `names` has it."""
    if any(name.startswith(BASE_PREFIXES) for name in names):
        return renames
    return [replace(rename, source=_without_base(rename.source)) for rename in renames]


def followed(names: Collection[str], renames: Sequence[Rename], program: Program) -> Mapping[str, Source]:
    """Return what each tensor is that holds weights of the program.

    If several renames make a weight, the first counts of which a tensor is among `names`, or simply the first.
    """
    candidates: dict[str, list[Rename]] = {name: [] for name in program.weights}
    for rename in renames:
        if all(target in candidates for target in rename.targets):
            for target in rename.targets:
                candidates[target].append(rename)
    unnamed = [name for name, found in candidates.items() if not found]
    assert not unnamed, f"the family's renames must name these: {unnamed}"

    def follows(rename: Rename) -> bool:
        return any(name in names for name, _ in _sources(rename, program))

    chosen = dict.fromkeys(next(filter(follows, found), found[0]) for found in candidates.values())
    return {name: source for rename in chosen for name, source in _sources(rename, program)}


def _sources(rename: Rename, program: Program) -> Iterator[tuple[str, Source]]:
    """Yield the tensors that together are what `rename` names."""
    if "{e}" not in rename.source:
        yield rename.source, Source(rename)
        return
    for expert in range(program.weights[rename.targets[0]][0]):
        yield rename.source.replace("{e}", str(expert)), Source(rename, expert)


def _without_base(source: str) -> str:
    return next((source.removeprefix(base) for base in BASE_PREFIXES if source.startswith(base)), source)
