"""Keys and values of few bits: what a cache keeps of them, the same on every backend.

A token's key or value of one head is rounded by itself, around its own scale: nothing depends on what else is in its
block, or on how a sequence was cut into steps.
"""

from collections.abc import Mapping

import numpy as np

from ridgeline.core.dtypes import BFLOAT16, FLOAT8_E4M3, Float32s
from ridgeline.core.errors import ConfigError
from ridgeline.program.op import KvState, LatentState, Program

SCALED = ("int8", "fp8", "int4")  # dtypes whose tokens have a bfloat16 scale for each head's key and value
ENTRY_BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1, "int4": 0.65625}
MAX_HEAD_DIM = 256  # of scaled heads: sums of 32 bits hold their products
MIN_NORMAL = np.float32(2.0**-6)  # of E4M3: what is smaller is less than the last bit of any large entry


def check_kv_dtype(kv_dtype: str, program: Program) -> None:
    """Raise ConfigError where a program's cache cannot be of this type."""
    if kv_dtype not in SCALED:
        return
    if any(isinstance(state, LatentState) for state in program.states):
        why = f"kv_dtype={kv_dtype} is for keys and values; this model keeps latents"
        raise ConfigError(f"{why}: use bfloat16 or float32")
    head_dim = max((state.head_dim for state in program.states if isinstance(state, KvState)), default=0)
    if head_dim > MAX_HEAD_DIM:
        limit = f"kv_dtype={kv_dtype} holds heads of up to {MAX_HEAD_DIM} entries, and this model's have {head_dim}"
        raise ConfigError(f"{limit}: use bfloat16 or float32")


def entry_bytes(program: Program, kv_dtype: str) -> float:
    """Return the mean bytes of an entry of keys, values or latents, with its share of a scale."""
    states = [state for state in program.states if isinstance(state, KvState)]
    entries = sum(2 * state.num_heads * state.head_dim for state in states)
    num_bytes = sum(state.bytes_per_token(ENTRY_BYTES[kv_dtype]) for state in states)
    return num_bytes / entries if entries else ENTRY_BYTES[kv_dtype]


def as_cached(kv_dtype: str, x: Float32s, *, keys: bool) -> Float32s:
    """Return what keys or values [..., head_dim] are after a cache of a scaled dtype: NaN where one is not finite.

    int8 and fp8 scale the largest entry to 127 and 448 by a bfloat16, and round to whole numbers or E4M3's normal ones.
    int4 rounds rotated entries: keys to 6 bits, values to 4, their first half to 5; the extreme is the lowest number.
    """
    with np.errstate(all="ignore"):
        if kv_dtype == "int4":
            rotated = rotate(x)
            most, least = rotated.max(-1, keepdims=True), rotated.min(-1, keepdims=True)
            lowest, num_fine = np.float32(-32 if keys else -8), 0 if keys else (x.shape[-1] + 15) // 32 * 16
            finer = (1 + (np.arange(x.shape[-1]) < num_fine)).astype(np.float32)
            ratio, scale = _divided(rotated, np.where(-least > most, least, most) / lowest)
            levels = np.clip(np.rint(ratio * finer), lowest * finer, -lowest * finer - 1)
            back = rotate(levels * (scale / finer)) / np.float32(rotation_width(x.shape[-1]))
            return np.where(np.isfinite(rotated).all(-1, keepdims=True), back, np.float32(np.nan))
        ratio, scale = _divided(x, np.abs(x).max(-1, keepdims=True) / np.float32(127 if kv_dtype == "int8" else 448))
        if kv_dtype == "int8":
            levels = np.clip(np.rint(ratio), -127, 127)
        else:
            levels, size = ratio.astype(FLOAT8_E4M3).astype(np.float32), np.abs(ratio)
            least_or_zero = np.copysign(np.where(size > MIN_NORMAL / 2, MIN_NORMAL, np.float32(0)), ratio)
            levels = np.where(size < MIN_NORMAL, least_or_zero, levels)
        return np.where(np.isfinite(x).all(-1, keepdims=True), levels * scale, np.float32(np.nan))


def rotation_width(head_dim: int) -> int:
    """Return the entries that are rotated together: the largest power of two that divides a head's."""
    return head_dim & -head_dim


def rotate(x: Float32s) -> Float32s:
    """Multiply heads [..., head_dim] by Hadamard matrices of +1 and -1; twice is times `rotation_width`."""
    step = 1
    while step < rotation_width(x.shape[-1]):
        pairs = x.reshape(*x.shape[:-1], -1, 2, step)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((low + high, low - high), axis=-2).reshape(x.shape)
        step *= 2
    return x


def _divided(x: Float32s, scale: Float32s) -> tuple[Float32s, Float32s]:
    scale = scale.astype(BFLOAT16).astype(np.float32)
    return np.divide(x, scale, out=np.zeros_like(x), where=scale != 0), scale
