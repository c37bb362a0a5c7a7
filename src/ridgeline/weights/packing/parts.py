"""The tensors that together store a matrix: checked against each other, as stored matrices that kernels have."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import Bytes, StoredFormat, StoredMatrix, Words, Zero
from ridgeline.weights.checkpoint import Checkpoint, TensorEntry

MAX_GROUP = 128  # larger groups are described as several with one scale

Wanted = dict[str, tuple[Collection[str], tuple[int, ...]]]
"""Dtypes and shape of stored tensors, by their names."""
Order = npt.NDArray[np.int32]
Scale = Literal["float16", "float32"]


def matrix_entry(entries: Mapping[str, TensorEntry], name: str, dims: Collection[int] = (2,)) -> TensorEntry:
    """Return the entry of a matrix, or with 3 `dims` of a stack of them. Raises ModelLoadError for any other."""
    entry = entries[name]
    if len(entry.shape) not in dims or 0 in entry.shape:
        raise ModelLoadError(f"{entry.file}: {name} is {list(entry.shape)}; it must be a matrix")
    return entry


def checked(entries: Mapping[str, TensorEntry], wanted: Wanted, what: str) -> tuple[str, ...]:
    """Return the names of stored tensors that are all there, as wanted; the first is the one that the others belong to.

    Raises ModelLoadError for one that is missing, or of other numbers or sizes than `what` needs.
    """
    names = tuple(wanted)
    first = entries[names[0]]
    if missing := [name for name in names if name not in entries]:
        what = f"{names[0]} has no {', '.join(missing)} beside it"
        raise ModelLoadError(f"{first.file}: {what}; download the model again")
    for name, (dtypes, shape) in wanted.items():
        if entries[name].dtype not in dtypes or entries[name].shape != shape:
            found = f"{name} is {entries[name].dtype} {list(entries[name].shape)}"
            needed = f"{' or '.join(dtypes)} {list(shape)} beside {names[0]} {list(first.shape)}"
            raise ModelLoadError(f"{entries[name].file}: {found}; {what} needs {needed}")
    return names


def scale_type(checkpoint: Checkpoint, *names: str) -> Scale:
    """Return the type that holds every number of tensors of floats exactly: float16 also where they are bfloat16."""
    for name in names:
        if checkpoint.entries[name].dtype != "F16" and not fits_float16(float32(checkpoint.tensor(name))):
            return "float32"
    return "float16"


def fits_float16(values: Array) -> bool:
    """Tell whether float16 holds all numbers exactly, or what is not one."""
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(np.float16).astype(np.float32), values, equal_nan=True)


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of consecutive inputs that share a scale: `size` of them in the file, 0 for all `num_inputs`."""

    num_inputs: int
    size: int

    @property
    def stored(self) -> int:
        """Inputs of a group of the file."""
        return self.size or self.num_inputs

    @property
    def count(self) -> int:
        """Number of groups of the file."""
        return -(-self.num_inputs // self.stored)

    @property
    def described(self) -> int:
        """Inputs of a group as it is described: large groups become several with the same scale."""
        is_cut = self.count == 1 or (self.stored > MAX_GROUP and self.stored % MAX_GROUP == 0)
        return MAX_GROUP if is_cut else self.stored

    def spread(self, values_NG: Array) -> Array:
        """Return one number for each group as it is described, from one for each group of the file."""
        if self.described == self.stored:
            return values_NG
        num_described = -(-self.num_inputs // self.described)
        times = num_described if self.count == 1 else self.stored // self.described
        return np.repeat(values_NG, times, axis=1)[:, :num_described]


@dataclass(frozen=True, slots=True)
class Integers:
    """How integers of 2 to 8 bits become stored matrices; their inputs in this `order`, where they have one."""

    groups: Groups
    bits: int
    form: StoredFormat
    order: Order | None

    @classmethod
    def of(
        cls, groups: Groups, bits: int, zero: Zero, scale: Scale, order: Order | None = None, *, whole: bool = False
    ) -> "Integers":
        """Describe them; `whole`: all inputs of an output share a float32 scale, and are one group."""
        name = "" if order is None else hashlib.blake2b(order.tobytes(), digest_size=16).hexdigest()
        group, scale = (0, "float32") if whole else (groups.described, scale)
        return cls(groups, bits, StoredFormat("uniform", 4 if bits <= 4 else 8, group, zero, scale, name), order)

    def matrix(
        self, packed: Bytes | Words, scales_NG: Array, points_NG: Bytes | None = None, minima_NG: Array | None = None
    ) -> StoredMatrix:
        """Return codes [N, K], or words of them, with what each group of the file has. A fixed zero is 2^(bits-1).

        Minima are rounded to float16 where that is the type of scales.
        """
        above = self.form.fixed_zero - (1 << (self.bits - 1))
        if self.form.zero == "fixed" and above:  # fewer bits around the zero of 4 or 8
            packed = packed + np.uint8(above)
        if self.order is not None:
            packed = packed[:, self.order]
        if minima_NG is not None and self.form.scale == "float16":
            minima_NG = minima_NG.astype(np.float16)
        minima = None if minima_NG is None else self._spread(float32(minima_NG))
        points = None if points_NG is None else self._spread(points_NG)
        return StoredMatrix(self.form, packed, self._spread(float32(scales_NG)), points, minima, self.order)

    def _spread(self, values_NG: Array) -> Array:
        return self.groups.spread(values_NG) if self.form.group else values_NG


def input_order(where: str, g_idx: Array, groups: Groups) -> Order | None:
    """Return the inputs group by group; None where they lie so. Some writers fill an unused index with 0 or -1.

    `where` begins the error for groups of other sizes, a ModelLoadError.
    """
    group_of = np.arange(groups.num_inputs) // groups.stored
    if np.array_equal(g_idx, group_of) or (g_idx == -1).all() or (groups.count == 1 and not g_idx.any()):
        return None
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], group_of):
        raise ModelLoadError(f"{where} does not put {groups.stored} inputs in each of {groups.count} groups")
    return order
