"""Layers are built of these: activations, norms, rotary positions, dense feed-forwards."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid"]
"""`quick_gelu` is x * sigmoid(1.702 x), `relu2` is relu(x)^2."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight; with `unit_offset` the weight is stored as its difference from 1 (Gemma)."""

    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class UnweightedRmsNorm:
    """Computes x / sqrt(mean(x^2) + eps)."""

    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight, plus a bias if it has one.

    `per_head`: over the heads of queries or keys, each head with a weight and bias of its own.
    `unit_offset`: the weight is stored as its difference from 1 (Nemotron).
    """

    eps: float
    bias: bool = True
    per_head: bool = False
    unit_offset: bool = False


Norm = RmsNorm | UnweightedRmsNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class PlainRope:
    """Computes frequencies theta^(-2i/d), as in the RoFormer paper (arXiv 2104.09864)."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Declares position interpolation: every frequency divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """Declares an NTK-aware base that grows with the context length beyond `original_context` tokens."""

    factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Low frequencies divided by `factor`, high ones as they are, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """Declares YaRN: interpolation by part and a temperature on the attention logits (arXiv 2309.00071)."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE: one divisor per frequency, another set beyond `original_context` tokens (arXiv 2402.13753)."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_context: int
    attention_factor: float | None = None
    factor: float | None = None


RopeScaling = PlainRope | LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope


@dataclass(frozen=True, slots=True)
class Rope:
    """Declares rotary positions on the first `rotary_dim` entries of each head.

    Halves are rotated against each other, or, where `interleaved`, even entries against the odd ones that follow them.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling = PlainRope()
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Computes down(act(gate(x)) * up(x))."""

    size: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Mlp:
    """Computes down(act(up(x)))."""

    size: int
    activation: Activation
    bias: bool = True
