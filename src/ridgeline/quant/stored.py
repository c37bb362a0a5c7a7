"""A matrix stored as small numbers: the one description that schemes make, checkpoints give and backends pack."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from ridgeline.core.dtypes import FLOAT8_E4M3, FLOAT32, Array, Float32s, assign, contiguous

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Code = Literal["uniform", "e2m1", "e4m3", "nf4", "fp4"]
Zero = Literal["fixed", "points", "minima"]

_E2M1_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the low three bits; the fourth is the sign
# bitsandbytes' own: quantiles of a normal distribution, and floats with its own places of magnitudes.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_SIZES = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
# The number that each code stands for; a uniform code is the number itself.
LEVELS: Mapping[Code, Float32s] = {
    "e2m1": np.array([*_E2M1_SIZES, *(-x for x in _E2M1_SIZES)], dtype=np.float32),
    "nf4": np.array(_NF4, dtype=np.float32),
    "fp4": np.array([*_FP4_SIZES, *(-x for x in _FP4_SIZES)], dtype=np.float32),
    "e4m3": np.arange(256, dtype=np.uint8).view(FLOAT8_E4M3).astype(np.float32),
}
E8M0_BIAS = 127
SCALE_BYTES = {"float16": 2, "float32": 4, "product": 1, "e8m0": 1, "e4m3": 1}
SUPER = 256  # inputs whose groups' scales are multiples of one float16, where scales are products
CHUNK_ELEMENTS = 1 << 16  # dequantized at a time: temporaries stay in a core's cache


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """How a matrix is stored. `group` consecutive inputs of an output share a scale, the last group may be shorter.

    `group` 0: all inputs do. `zero` is what a code is measured from: "fixed", 2^(bits-1) of uniform codes and 0 of
    others; "points", one of each group; or "minima": a number that is added after scaling. `scale` is the type that
    holds every scale and minimum exactly, "e8m0" a power of two; "product": a whole number from -128 to 127 times a
    float16 that SUPER inputs share; "e4m3": an 8-bit float times, or over, a float32 that all inputs share. `order`
    names the order of the inputs where they are stored in another than they are computed in. The last `outliers` of
    them keep 16 bits where the others are rounded to 8.
    """

    code: Code
    bits: Literal[4, 8]
    group: int
    zero: Zero = "fixed"
    scale: Literal["float16", "float32", "product", "e8m0", "e4m3"] = "float16"
    order: str = ""
    outliers: int = 0

    @property
    def fixed_zero(self) -> int:
        """The code of zero where it is fixed."""
        return 1 << (self.bits - 1) if self.code == "uniform" else 0

    def num_groups(self, num_inputs: int) -> int:
        """Return the number of groups of an output."""
        return -(-num_inputs // self.group) if self.group else 1

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of matrices [.., N, K] as a backend stores them, without padding."""
        *outputs, num_inputs = shape
        zero_bytes = {"fixed": 0, "points": 1, "minima": SCALE_BYTES[self.scale]}[self.zero]
        group_bytes = SCALE_BYTES[self.scale] + zero_bytes
        super_bytes = (4 if zero_bytes else 2) * -(-num_inputs // SUPER) if self.scale == "product" else 0
        super_bytes += 4 if self.scale == "e4m3" else 0
        code_bytes = -(-num_inputs * self.bits // 8)
        return math.prod(outputs) * (code_bytes + self.num_groups(num_inputs) * group_bytes + super_bytes)

    def __str__(self) -> str:
        name = {"e8m0": "mxfp4", "e4m3": "nvfp4"}.get(self.scale, self.code)
        number = f"int{self.bits}" if self.code == "uniform" else name
        groups = f" in groups of {self.group}" if self.group else ""
        zeros = {"fixed": "", "points": " with zero points", "minima": " with minima"}[self.zero]
        finer = f", {self.outliers} inputs in 16 bits" if self.outliers else ""
        return number + groups + zeros + (finer or (" and an order of inputs" if self.order else ""))


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [N, K]: uint8 `codes` [N, K], float32 `scales` [N, G], and what `format.zero` asks for.

    They are `packed` as they come: bytes, or codes of 4 bits of eight inputs in a word, the first in its low bits.

    w[n, k] = (level(codes[n, k]) - zero) * scales[n, k // group]      zero: fixed, or uint8 `points` [N, G]
    w[n, k] = level(codes[n, k]) * scales[n, k // group] + minima[n, k // group]

    With `order` int32 [K], of an ordered format, these are the numbers w[n, order[k]]. Scales that are products are
    whole multiples of `outer` float32 [N, K / SUPER, 1 or 2], minima of its second numbers. Scales that are 8-bit
    floats are multiplied by `outer` float32 [N, 1] or, where that is negative, divided by it without its sign.
    """

    format: StoredFormat
    packed: Bytes | Words
    scales: Float32s
    points: Bytes | None = None
    minima: Float32s | None = None
    order: npt.NDArray[np.int32] | None = None
    outer: Float32s | None = None

    @property
    def codes(self) -> Bytes:
        packed = self.packed
        return nibbles(contiguous(packed.T).view(np.uint8)) if has_words(packed) else packed.view(np.uint8)


def has_words(packed: Bytes | Words) -> TypeGuard[Words]:
    """Tell whether codes are uint32 [K / 8, N]."""
    return packed.dtype == np.uint32


def from_e8m0(exponents: Array) -> Float32s:
    """Return powers of two by their exponents, uint8; 255 is NaN."""
    scales = np.exp2(np.minimum(exponents, 254) - float(E8M0_BIAS)).astype(np.float32)
    return np.where(exponents == 255, np.float32(np.nan), scales)


def to_e8m0(scales: Float32s) -> Bytes:
    """Return the exponents of powers of two, as `from_e8m0` takes them."""
    return (np.frexp(scales)[1] + (E8M0_BIAS - 1)).astype(np.uint8)


def times_outer(scales_NG: Float32s, outer_N1: Float32s) -> Float32s:
    """Return scales times what an output has, or where that is negative divided by it without its sign."""
    return np.where(outer_N1 < 0, scales_NG / -outer_N1, scales_NG * outer_N1)


def nibbles(packed: Bytes) -> Bytes:
    """Return the two 4-bit codes of every byte, [.., n] as [.., 2 n], that of the low bits first."""
    wide = packed.astype(np.uint16, order="C")
    wide |= wide << np.uint16(4)
    wide &= np.uint16(0x0F0F)
    return wide.view(np.uint8)


def joined(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """Return matrices of one format, and of one order, as one, their rows one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    words = [part.packed for part in parts if has_words(part.packed)]
    is_packed = len(words) == len(parts)
    packed = np.concatenate(words, axis=1) if is_packed else np.concatenate([part.codes for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    others: list[tuple[Any, ...]] = [(part.points, part.minima, part.outer) for part in parts]
    points, minima, outer = (None if each[0] is None else np.concatenate(each) for each in zip(*others))
    return StoredMatrix(first.format, packed, scales, points, minima, first.order, outer)


def dequantize(stored: StoredMatrix, dtype: np.dtype[Any] = FLOAT32) -> Array:
    """Return the numbers that the codes stand for, [N, K]: each a float32 product, and a sum with its minimum.

    What schemes promise, backends compute with and tests compare with. A scale that is no number makes none. A `dtype`
    narrower than float32 rounds once more.
    """
    stored = replace(stored, packed=stored.codes)
    num_outputs, num_inputs = stored.codes.shape
    out = np.empty((num_outputs, num_inputs), dtype)
    step = max(1, CHUNK_ELEMENTS // max(1, num_inputs))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for begin in range(0, num_outputs, step):
            rows = slice(begin, begin + step)
            values = _dequantized_rows(stored, rows)
            if stored.order is not None:
                values = values[:, np.argsort(stored.order)]
            assign(out[rows], values)
    return out


def _dequantized_rows(stored: StoredMatrix, rows: slice) -> Float32s:
    form, codes = stored.format, stored.codes[rows]
    num_inputs = codes.shape[1]
    group, num_groups = form.group or num_inputs, form.num_groups(num_inputs)
    if num_groups * group != num_inputs:
        codes = np.pad(codes, ((0, 0), (0, num_groups * group - num_inputs)))
    levels = codes.astype(np.float32) if form.code == "uniform" else _levels(form.code, codes)
    levels = levels.reshape(-1, num_groups, group)
    if stored.points is not None:
        levels -= stored.points[rows].astype(np.float32)[:, :, None]
    elif stored.minima is None and form.fixed_zero:
        levels -= np.float32(form.fixed_zero)
    scales = stored.scales[rows]
    if form.scale == "e4m3" and stored.outer is not None:
        scales = times_outer(scales, stored.outer[rows])
    levels *= scales[:, :, None]
    if stored.minima is not None:
        levels += stored.minima[rows][:, :, None]
    return levels.reshape(len(levels), -1)[:, :num_inputs]


def _levels(code: Code, codes: Bytes) -> Float32s:
    """Look up levels, two at a time where their number is even: an index costs more than what it finds."""
    if codes.size % 2:
        return np.take(LEVELS[code], codes)
    return np.take(_level_pairs(code), np.ascontiguousarray(codes).reshape(-1).view(np.uint16)).view(np.float32)


@cache
def _level_pairs(code: Code) -> npt.NDArray[np.uint64]:
    """Return the levels of both codes of 16 bits, as one number of 64 bits."""
    levels = np.resize(LEVELS[code], 256)
    return np.stack([np.tile(levels, 256), np.repeat(levels, 256)], axis=1).view(np.uint64).reshape(-1)
