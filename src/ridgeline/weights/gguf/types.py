"""The tensor types of GGUF that are read, and what their bytes mean.

A row is cut into blocks that are stored one after the other; each block holds its own scales. `split` turns blocks,
uint8 [blocks, bytes], into the parts of stored matrices, a block a row. Their products are rounded as ggml's reference
rounds them. Types below 4 bits point into tables of numbers, which the optional `gguf` package has.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import SUPER, Bytes, StoredFormat, StoredMatrix, Zero, dequantize, from_e8m0

Floats = npt.NDArray[np.float32]
Parts = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None, npt.NDArray[Any] | None]
"""Codes [blocks, elements], uint8; of a StoredMatrix scales and minima [blocks, groups], and outer [blocks, 1 or 2]."""

CHUNK_ELEMENTS = 1 << 18  # of float32 at a time: temporaries stay in a core's cache


@dataclass(frozen=True, slots=True)
class GgufType:
    """`block` elements take `block_bytes` bytes; without `form` they are plain, or decoded by the library."""

    name: str
    block: int
    block_bytes: int
    form: StoredFormat | None = None
    split: Callable[[Bytes], Parts] | None = None

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor whose rows are whole blocks."""
        return math.prod(shape) // self.block * self.block_bytes

    def dequantize(self, data: Bytes, shape: tuple[int, ...]) -> Floats:
        """Decode stored bytes to float32 of `shape`. Raises ValueError where a scale is not finite."""
        blocks = data.reshape(-1, self.block_bytes)
        out = np.empty((len(blocks), self.block), dtype=np.float32)
        step = CHUNK_ELEMENTS // self.block
        with np.errstate(invalid="ignore", over="ignore"):
            for begin in range(0, len(blocks), step):
                part = self._numbers(blocks[begin : begin + step])
                if not np.isfinite(part).all():
                    raise ValueError("a scale is NaN, infinite or too large")
                out[begin : begin + step] = part
        return out.reshape(shape)

    def _numbers(self, blocks: Bytes) -> Floats:
        if self.form is None or self.split is None:
            return _by_library(self.name, blocks)
        codes, scales, minima, _ = self.split(blocks)
        return dequantize(StoredMatrix(self.form, codes, scales, minima=minima))

    def stored_matrix(self, data: Bytes, shape: tuple[int, ...], rows: slice | npt.NDArray[np.int64]) -> StoredMatrix:
        """Return `rows` of a matrix of this `shape`, whose bytes are `data`."""
        assert self.form is not None and self.split is not None
        codes, scales, minima, outer = self.split(data.reshape(-1, self.block_bytes))
        return StoredMatrix(
            self.form,
            codes.reshape(shape)[rows],
            scales.reshape(shape[0], -1)[rows],
            minima=None if minima is None else minima.reshape(shape[0], -1)[rows],
            outer=None if outer is None else outer.reshape(shape[0], -1, outer.shape[1])[rows],
        )


def _by_library(name: str, blocks: Bytes) -> Floats:
    """Return what the `gguf` package makes of blocks."""
    try:
        library = import_module("gguf")
    except ImportError:
        what = f"tensors of type {name} are decoded by the gguf package, which is not installed"
        raise ModelLoadError(f"{what}; add it with pip install 'ridgeline[gguf]'") from None
    return library.dequantize(blocks, library.GGMLQuantizationType[name])


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at byte `at` of each block, [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Split [..., n] bytes into [..., 2, n]: the low halves, then the high ones."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-2)


def _q4_values(blocks: Bytes, at: int) -> Bytes:
    """Unpack the 32 values from 0 to 15 of each block, two in a byte from byte `at` on."""
    return _nibbles(blocks[:, at:]).reshape(len(blocks), 32)


def _q5_values(blocks: Bytes, at: int) -> Bytes:
    """Unpack 32 values from 0 to 31: four bits of each from byte `at` on, the fifth in the four bytes before it."""
    fifth_bits = np.unpackbits(blocks[:, at - 4 : at], axis=1, bitorder="little")
    return _q4_values(blocks, at) | fifth_bits << np.uint8(4)


def _q2_k(blocks: Bytes) -> Parts:
    return _two_bits(blocks, 16), *_products(blocks, 80, blocks[:, :16] & 15, blocks[:, :16] >> 4)


def _q3_k(blocks: Bytes) -> Parts:
    """Put two bits and one of a mask around 8 bits' zero; scales of 6 bits: 8 bytes of low halves, 4 of high bits."""
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - np.float32(32)
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, SUPER)
    codes = (_two_bits(blocks, 32) | third << 2) + np.uint8(128 - 4)
    return codes, *_products(blocks, 108, scales)


def _two_bits(blocks: Bytes, at: int) -> Bytes:
    """Unpack the 256 values from 0 to 3 of 64 bytes from byte `at`."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (blocks[:, at : at + 64].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, SUPER)


def _products(blocks: Bytes, at: int, *factors: npt.NDArray[Any]) -> tuple[Floats, Floats | None, Floats]:
    """Return scales, and negated minima if any: these factors times the float16 numbers from byte `at` on."""
    outer = _half(blocks, at)
    if len(factors) == 1:
        return outer * factors[0], None, outer
    less = -_half(blocks, at + 2)
    return outer * factors[0], less * factors[1], np.concatenate([outer, less], axis=1)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats | None, Floats]:
    """Unpack scale and minimum of the 8 groups of a Q4_K or Q5_K block.

    Twelve bytes from the fifth on hold them with 6 bits: 4 scales, 4 minima, and 4 bytes of low bits whose two high
    bits fill up the first eight bytes.
    """
    first, second, low = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, low & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, low >> 4 | second >> 2 & 48], axis=1)
    return _products(blocks, 0, scales, minima)


def _q4_k(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, SUPER), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (low | high << 4).reshape(-1, SUPER), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    """Put six bits around the zero of eight."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    codes = (low | _two_bits(blocks, 128).reshape(-1, 8, 32) << 4).reshape(-1, SUPER) + np.uint8(128 - 32)
    return codes, *_products(blocks, 208, blocks[:, 192:208].view(np.int8))


# The numbers that 4 bits stand for, around the zero of 8 bits.
_IQ4_VALUES = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=np.uint8)


def _iq4_xs(blocks: Bytes) -> Parts:
    """Scales of 8 groups have 6 bits: four in a nibble, two in the 16 bits from byte 2 on."""
    low = _pairs(blocks[:, 4:8])
    high = blocks[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high << 4).astype(np.float32) - np.float32(32)
    codes = _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, SUPER)]
    return codes, *_products(blocks, 0, scales)


def _pairs(packed: Bytes) -> Bytes:
    """Split [.., n] bytes into [.., 2 n]: the low half and the high half of each."""
    return (packed[..., None] >> np.array([0, 4], np.uint8) & np.uint8(15)).reshape(len(packed), -1)


def _iq3_s(blocks: Bytes) -> Parts:
    """Scale 8 groups by odd numbers: of a block whose float16 is 1 the library makes these times integers below 16."""
    odd = 1 + 2 * _pairs(blocks[:, 106:]).astype(np.float32)
    ones = np.concatenate([np.ones((len(blocks), 1), np.float16).view(np.uint8), blocks[:, 2:]], axis=1)
    whole = _by_library("IQ3_S", ones).reshape(-1, 8, 32) / odd[:, :, None]
    return (whole.reshape(-1, SUPER) + 128).astype(np.uint8), *_products(blocks, 0, odd)


def _tq1_0(blocks: Bytes) -> Parts:
    """Unpack five numbers of three values from a byte, of the last four bytes four: a fraction of 256 in base 3."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = (blocks[:, :32], powers), (blocks[:, 32:48], powers), (blocks[:, 48:52], powers[:4])
    fractions = np.concatenate([(part[:, None] * by).reshape(len(blocks), -1) for part, by in parts], axis=1)
    return (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8) + np.uint8(7), _half(blocks, 52), None, None


def _tq2_0(blocks: Bytes) -> Parts:
    return _two_bits(blocks, 0) + np.uint8(7), _half(blocks, 64), None, None


def _mxfp4(blocks: Bytes) -> Parts:
    """Return E2M1's codes, of which ggml takes the negative zero for the other one."""
    codes = _nibbles(blocks[:, 1:]).reshape(len(blocks), 32)
    return np.where(codes == 8, np.uint8(0), codes), from_e8m0(blocks[:, :1]), None, None


def _of_32(name: str, block_bytes: int, bits: Literal[4, 8], codes: Callable[[Bytes], Bytes], zero: Zero) -> GgufType:
    """Return a type whose blocks of 32 begin with their scale and, where it has them, their minimum."""

    def split(blocks: Bytes) -> Parts:
        return codes(blocks), _half(blocks, 0), _half(blocks, 2) if zero == "minima" else None, None

    return GgufType(name, 32, block_bytes, StoredFormat("uniform", bits, 32, zero), split)


TYPES: Mapping[int, GgufType] = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: _of_32("Q4_0", 18, 4, lambda blocks: _q4_values(blocks, 2), "fixed"),
    3: _of_32("Q4_1", 20, 4, lambda blocks: _q4_values(blocks, 4), "minima"),
    6: _of_32("Q5_0", 22, 8, lambda blocks: _q5_values(blocks, 6) + np.uint8(128 - 16), "fixed"),
    7: _of_32("Q5_1", 24, 8, lambda blocks: _q5_values(blocks, 8), "minima"),
    8: _of_32("Q8_0", 34, 8, lambda blocks: blocks[:, 2:] ^ np.uint8(128), "fixed"),
    10: GgufType("Q2_K", SUPER, 84, StoredFormat("uniform", 8, 16, "minima", "product"), _q2_k),
    11: GgufType("Q3_K", SUPER, 110, StoredFormat("uniform", 8, 16, scale="product"), _q3_k),
    12: GgufType("Q4_K", SUPER, 144, StoredFormat("uniform", 4, 32, "minima", "product"), _q4_k),
    13: GgufType("Q5_K", SUPER, 176, StoredFormat("uniform", 8, 32, "minima", "product"), _q5_k),
    14: GgufType("Q6_K", SUPER, 210, StoredFormat("uniform", 8, 16, scale="product"), _q6_k),
    16: GgufType("IQ2_XXS", SUPER, 66),
    17: GgufType("IQ2_XS", SUPER, 74),
    18: GgufType("IQ3_XXS", SUPER, 98),
    19: GgufType("IQ1_S", SUPER, 50),
    20: _of_32("IQ4_NL", 18, 8, lambda blocks: _IQ4_VALUES[_q4_values(blocks, 2)], "fixed"),
    21: GgufType("IQ3_S", SUPER, 110, StoredFormat("uniform", 8, 32, scale="product"), _iq3_s),
    22: GgufType("IQ2_S", SUPER, 82),
    23: GgufType("IQ4_XS", SUPER, 136, StoredFormat("uniform", 8, 32, scale="product"), _iq4_xs),
    29: GgufType("IQ1_M", SUPER, 56),
    30: GgufType("BF16", 1, 2),
    34: GgufType("TQ1_0", SUPER, 54, StoredFormat("uniform", 4, SUPER), _tq1_0),
    35: GgufType("TQ2_0", SUPER, 66, StoredFormat("uniform", 4, SUPER), _tq2_0),
    39: GgufType("MXFP4", 32, 17, StoredFormat("e2m1", 4, 32, scale="e8m0"), _mxfp4),
}

# Types that are not read.
OTHER_NAMES: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
