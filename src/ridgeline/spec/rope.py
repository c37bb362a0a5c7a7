"""Compute rotary frequencies: (Rope, context length) -> one frequency per rotated pair, and a factor on cos and sin.

Called by `program/lower.py`. Frequencies are computed in fp32, as the models were trained with. numpy only.
"""

import math
from typing import assert_never

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import ConfigError
from ridgeline.spec.parts import DynamicRope, LinearRope, Llama3Rope, LongRope, PlainRope, Rope, YarnRope

FloatArray = npt.NDArray[np.float32]


def frequencies(rope: Rope, context_length: int) -> tuple[FloatArray, float]:
    """Return angular frequencies, fp32 [rotary_dim / 2] in radians per position, and the factor on cos and sin.

    `context_length` is the longest sequence the engine is configured for, in tokens; it selects the factors of
    the scalings that depend on it (dynamic, longrope). Raises ConfigError where a factor list has the wrong length
    or the parameters describe no frequencies.
    """
    plain = _inverse(rope.theta, rope.rotary_dim)
    match rope.scaling:
        case PlainRope():
            return plain, 1.0
        case LinearRope(factor=factor):
            return plain / np.float32(factor), 1.0
        case DynamicRope() as dynamic:
            return _dynamic(rope, dynamic, context_length), 1.0
        case Llama3Rope() as llama3:
            return _llama3(plain, llama3), 1.0
        case YarnRope() as yarn:
            return _yarn(rope, plain, yarn), _yarn_attention_factor(yarn)
        case LongRope() as long:
            return _longrope(plain, long, context_length)
    assert_never(rope.scaling)


def _inverse(theta: float, dim: int) -> FloatArray:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float32(1.0) / np.power(np.float32(theta), exponents)).astype(np.float32)


def _dynamic(rope: Rope, scaling: DynamicRope, context_length: int) -> FloatArray:
    if rope.rotary_dim <= 2:
        raise ConfigError("rope type 'dynamic' needs at least 4 rotated entries per head: its exponent is d / (d - 2)")
    length = max(context_length, scaling.original_context)
    stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    return _inverse(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)), rope.rotary_dim)


def _llama3(plain: FloatArray, scaling: Llama3Rope) -> FloatArray:
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
    if not 0 < low < high:
        raise ConfigError(f"rope low_freq_factor ({low:g}) must be positive and below high_freq_factor ({high:g})")
    wavelength = 2 * np.float32(math.pi) / plain
    ramp = (context / wavelength - low) / (high - low)
    blended = (1 - ramp) * plain / scaling.factor + ramp * plain
    out = np.where(wavelength > context / low, plain / scaling.factor, plain)
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(between, blended, out).astype(np.float32)


def _yarn(rope: Rope, plain: FloatArray, scaling: YarnRope) -> FloatArray:
    if rope.theta <= 1.0:
        raise ConfigError(f"rope type 'yarn' needs rope_theta above 1, got {rope.theta:g}: it divides by log(theta)")

    def dimension_of(rotations: float) -> float:
        """Return the pair index whose frequency makes `rotations` turns within the original context."""
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # avoids 0/0: the ramp becomes a step
    ramp = np.clip((np.arange(rope.rotary_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(scaling: YarnRope) -> float:
    def temperature(factor: float, mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.factor, scaling.mscale) / temperature(scaling.factor, scaling.mscale_all_dim)
    return temperature(scaling.factor, 1.0)


def _longrope(plain: FloatArray, scaling: LongRope, context_length: int) -> tuple[FloatArray, float]:
    for name, given in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
        if len(given) != len(plain):
            raise ConfigError(f"rope {name} has {len(given)} entries; this model rotates {len(plain)} pairs per head")
    divisors = scaling.long_factor if context_length > scaling.original_context else scaling.short_factor
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        factor = scaling.factor or 1.0
        base = math.log(max(scaling.original_context, 2))
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / base)
    return (plain / np.asarray(divisors, dtype=np.float32)).astype(np.float32), attention_factor
