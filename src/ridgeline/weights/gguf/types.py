"""The tensor types of GGUF that are read, and what their bytes mean.

A row is cut into blocks that are stored one after the other; each block holds its own scales. `decode` turns blocks,
uint8 [blocks, bytes], into float32 [blocks, elements], rounding as ggml's reference does. Pure numpy.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.quant.stored import StoredFormat, StoredMatrix

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Parts = tuple[Bytes, Floats, Floats | None]
"""Codes [blocks, elements], and the scales and minima [blocks, groups] of a StoredMatrix."""

CHUNK_ELEMENTS = 1 << 18  # of float32 at a time: temporaries stay in a core's cache
SUPER = 256  # elements of a block of the K types


@dataclass(frozen=True, slots=True)
class GgufType:
    """`block` elements take `block_bytes` bytes; without `decode` an element is a number as it is stored."""

    name: str
    block: int
    block_bytes: int
    decode: Callable[[Bytes], Floats] | None = None
    integers: StoredFormat | None = None  # of types whose blocks are integers with float16 scales and maybe minima
    split: Callable[[Bytes], Parts] | None = None  # of blocks into these
    rounded: bool = False  # their scales and minima are products, which float16 holds to 2^-11

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor whose rows are whole blocks."""
        return math.prod(shape) // self.block * self.block_bytes

    def dequantize(self, data: Bytes, shape: tuple[int, ...]) -> Floats:
        """Decode stored bytes to float32 of `shape`. Raises ValueError where a scale is not finite."""
        assert self.decode is not None
        blocks = data.reshape(-1, self.block_bytes)
        out = np.empty((len(blocks), self.block), dtype=np.float32)
        step = CHUNK_ELEMENTS // self.block
        with np.errstate(invalid="ignore", over="ignore"):
            for begin in range(0, len(blocks), step):
                out[begin : begin + step] = self.decode(blocks[begin : begin + step])
                if not np.isfinite(out[begin : begin + step]).all():
                    raise ValueError("a scale is NaN, infinite or too large")
        return out.reshape(shape)

    def stored_matrix(self, data: Bytes, shape: tuple[int, ...], rows: slice | npt.NDArray[np.int64]) -> StoredMatrix:
        """Return `rows` of a matrix of integers of this `shape`, whose bytes are `data`."""
        assert self.integers is not None and self.split is not None
        codes, scales, minima = self.split(data.reshape(-1, self.block_bytes))
        num_rows = shape[0]
        return StoredMatrix(
            self.integers,
            codes.reshape(shape)[rows],
            scales.reshape(num_rows, -1)[rows],
            minima=None if minima is None else minima.reshape(num_rows, -1)[rows],
        )


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at byte `at` of each block, [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Split [..., n] bytes into [..., 2, n]: the low halves, then the high ones."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-2)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Unpack 32 bits from byte `at` of each block, each as 16 or 0, [blocks, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q8_0_parts(blocks: Bytes) -> Parts:
    return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None


def _q4_0_parts(blocks: Bytes) -> Parts:
    return _q4_values(blocks, 2), _half(blocks, 0), None


def _q4_1_parts(blocks: Bytes) -> Parts:
    return _q4_values(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q5_0_parts(blocks: Bytes) -> Parts:
    """Put five bits around the zero of eight."""
    return (_q4_values(blocks, 6) | _fifth_bits(blocks, 2)) + np.uint8(128 - 16), _half(blocks, 0), None


def _q4_k_parts(blocks: Bytes) -> Parts:
    """Scales and minima are the nearest that float16 has: with 11 bits of the 17 that a product of 11 and 6 can have.

    None of them is less exact for being small, since the float16 that both are multiples of is of the block.
    """
    scales, minima = (part[:, :, 0].astype(np.float16).astype(np.float32) for part in _k_scales(blocks))
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, SUPER), scales, -minima


def _iq4_nl_parts(blocks: Bytes) -> Parts:
    return _IQ4_VALUES.view(np.uint8)[_q4_values(blocks, 2)] ^ np.uint8(128), _half(blocks, 0), None


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _q4_values(blocks: Bytes, at: int) -> Bytes:
    """Unpack the 32 values from 0 to 15 of blocks of Q4_0 and Q4_1, which begin at byte `at`."""
    return _nibbles(blocks[:, at:]).reshape(len(blocks), 32)


def _q4_0(blocks: Bytes) -> Floats:
    return (_q4_values(blocks, 2).astype(np.float32) - np.float32(8)) * _half(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    return _q4_values(blocks, 4).astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    values = _q4_values(blocks, 6) | _fifth_bits(blocks, 2)
    return (values.astype(np.float32) - np.float32(16)) * _half(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    values = _q4_values(blocks, 8) | _fifth_bits(blocks, 4)
    return values.astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q2_k(blocks: Bytes) -> Floats:
    scales: Floats = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minima: Floats = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    values = _two_bits(blocks, 16).astype(np.float32)
    return (values * scales[:, :, None] - minima[:, :, None]).reshape(-1, SUPER)


def _q3_k(blocks: Bytes) -> Floats:
    """Decode two bits and one of a mask. Scales of 6 bits are eight bytes of low halves, then four of high bits."""
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales: Floats = ((low | high << 4).astype(np.float32) - np.float32(32)) * _half(blocks, 108)
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 16, 16)
    values = (_two_bits(blocks, 32) | third << 2).astype(np.float32) - np.float32(4)
    return (values * scales[:, :, None]).reshape(-1, SUPER)


def _two_bits(blocks: Bytes, at: int) -> Bytes:
    """Unpack the 256 values from 0 to 3 of 64 bytes from byte `at`, [blocks, 16, 16]."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (blocks[:, at : at + 64].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 16, 16)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Unpack scale and minimum of the 8 groups of a Q4_K or Q5_K block, [blocks, 8, 1] each.

    Twelve bytes from the fifth on hold them with 6 bits: 4 scales, 4 minima, and 4 bytes of low bits whose two high
    bits fill up the first eight bytes.
    """
    first, second, low = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, low & 15 | first >> 2 & 48], axis=1).astype(np.float32)
    minima = np.concatenate([second & 63, low >> 4 | second >> 2 & 48], axis=1).astype(np.float32)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _k_scales(blocks)
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (values * scales - minima).reshape(-1, SUPER)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return ((low | high << 4) * scales - minima).reshape(-1, SUPER)


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32)
    scales: Floats = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)
    values = (low | high << 4).astype(np.float32) - np.float32(32)
    return (values.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, SUPER)


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _IQ4_VALUES[_q4_values(blocks, 2)].astype(np.float32) * _half(blocks, 0)


def _iq4_xs(blocks: Bytes) -> Floats:
    """Scales of 8 groups have 6 bits: four in a nibble, two in the 16 bits from byte 2 on."""
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    high = blocks[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales: Floats = ((low | high << 4).astype(np.float32) - np.float32(32)) * _half(blocks, 0)
    values = _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)].astype(np.float32)
    return (values * scales[:, :, None]).reshape(-1, SUPER)


# The values of E2M1 times two, with the scale halved to make up for it: an exponent of 0 needs half of 2^-127.
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
_E8M0_HALVED: Floats = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    return _E2M1_DOUBLED[_nibbles(blocks[:, 1:]).reshape(len(blocks), 32)] * _E8M0_HALVED[blocks[:, :1]]


TYPES: Mapping[int, GgufType] = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18, _q4_0, StoredFormat("uniform", 4, 32), _q4_0_parts),
    3: GgufType("Q4_1", 32, 20, _q4_1, StoredFormat("uniform", 4, 32, "minima"), _q4_1_parts),
    6: GgufType("Q5_0", 32, 22, _q5_0, StoredFormat("uniform", 8, 32), _q5_0_parts),
    7: GgufType("Q5_1", 32, 24, _q5_1),
    8: GgufType("Q8_0", 32, 34, _q8_0, StoredFormat("uniform", 8, 32), _q8_0_parts),
    10: GgufType("Q2_K", SUPER, 84, _q2_k),
    11: GgufType("Q3_K", SUPER, 110, _q3_k),
    12: GgufType("Q4_K", SUPER, 144, _q4_k, StoredFormat("uniform", 4, 32, "minima"), _q4_k_parts, rounded=True),
    13: GgufType("Q5_K", SUPER, 176, _q5_k),
    14: GgufType("Q6_K", SUPER, 210, _q6_k),
    20: GgufType("IQ4_NL", 32, 18, _iq4_nl, StoredFormat("uniform", 8, 32), _iq4_nl_parts),
    23: GgufType("IQ4_XS", SUPER, 136, _iq4_xs),
    30: GgufType("BF16", 1, 2),
    39: GgufType("MXFP4", 32, 17, _mxfp4),
}
