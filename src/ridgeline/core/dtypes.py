"""The number types of weights, and casts between them: other ways where numpy's own loops are slow.

bfloat16 and float8 arrays are numpy arrays with the types of `ml_dtypes`, which are moved as integers here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32s = npt.NDArray[np.float32]

FLOAT32: np.dtype[Any] = np.dtype(np.float32)
FLOAT16: np.dtype[Any] = np.dtype(np.float16)
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES: Mapping[str, np.dtype[Any]] = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}

CHUNK_ELEMENTS = 1 << 15  # cast at a time: temporaries stay in a core's cache


def to_dtype(array: Array, dtype: np.dtype[Any]) -> Array:
    """Cast to `dtype`, rounding to nearest, halves to even; the array itself where it has that type.

    A copy is contiguous. What is too large for `dtype` becomes infinite.
    """
    if array.dtype == dtype:
        return array
    source = contiguous(array).reshape(-1)
    widen = _WIDEN.get(source.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if widen is None:
            return source.astype(dtype).reshape(array.shape)
        out = np.empty(source.size, dtype)
        for begin in range(0, source.size, CHUNK_ELEMENTS):
            chunk = slice(begin, begin + CHUNK_ELEMENTS)
            _movable(out)[chunk] = _movable(widen(source[chunk]).astype(dtype, copy=False))
        return out.reshape(array.shape)


def float32(array: Array) -> Float32s:
    """Cast to float32."""
    return to_dtype(array, FLOAT32)


def contiguous(array: Array) -> Array:
    """Lay the array out row by row; the array itself where it is."""
    if array.flags.c_contiguous:
        return array
    return np.asarray(_movable(array), order="C").view(array.dtype)


def assign(target: Array, source: Array) -> None:
    """Write `source` into `target`, of the same shape, in its type."""
    _movable(target)[...] = _movable(to_dtype(source, target.dtype))


def equal(a: Array, b: Array) -> bool:
    """Tell whether two arrays have the same type, shape and bits."""
    return a.dtype == b.dtype and np.array_equal(_movable(a), _movable(b))


def all_finite(array: Array) -> bool:
    """Tell whether an array of float32, float16 or bfloat16 has neither NaN nor infinity."""
    bits = contiguous(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    magnitude = np.array(~(1 << (8 * array.dtype.itemsize - 1)), np.int64).astype(bits.dtype)  # all bits but the sign
    infinity = np.array(np.inf, array.dtype).view(bits.dtype)
    parts = (bits[begin : begin + CHUNK_ELEMENTS] for begin in range(0, bits.size, CHUNK_ELEMENTS))
    return all(bool((part & magnitude).max() < infinity) for part in parts)


def _movable(array: Array) -> Array:
    """Return the same memory as integers, which numpy copies and compares fast, where the type is not numpy's own."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)


_FLOAT8_VALUES: Float32s = np.arange(256, dtype=np.uint8).view(FLOAT8_E4M3).astype(np.float32)


def _widen_float8(chunk: Array) -> Float32s:
    return np.take(_FLOAT8_VALUES, chunk.view(np.uint8))


def _widen_float16(chunk: Array) -> Float32s:
    """Move the bits to where float32 has them, and make up for the exponent's bias by an exact product."""
    bits = chunk.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= -0x70002000  # sign, exponent and fraction, without the copies of the sign
    values = bits.view(np.float32)
    values *= np.float32(2**112)
    if max(values.max(), -values.min()) >= 2**16:  # infinity or NaN
        bits[np.abs(values) >= 2**16] |= 0x7F800000
    return values


# From types whose casts in numpy and ml_dtypes are slow.
_WIDEN: Mapping[np.dtype[Any], Callable[[Array], Float32s]] = {FLOAT16: _widen_float16, FLOAT8_E4M3: _widen_float8}
