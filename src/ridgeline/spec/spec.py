"""DecoderSpec: WHAT a decoder-only language model is, as frozen data.

Built by `families/<model_type>.py` from a config.json, lowered to a Program by `program/lower.py`.
A layer is a mixer and a feed-forward, each a type of its own: a new kind of layer is a new dataclass here,
never another flag on an old one. Imports nothing but core.
"""

from dataclasses import dataclass
from typing import Literal

from ridgeline.core.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight; with `unit_offset` the weight is stored as its difference from 1 (Gemma)."""

    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    eps: float


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class PlainRope:
    """Frequencies theta^(-2i/d), as in the RoFormer paper (arXiv 2104.09864)."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Position interpolation: every frequency divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """NTK-aware base that grows with the context length beyond `original_context` tokens."""

    factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN: interpolation by part and a temperature on the attention logits (arXiv 2309.00071)."""

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
    """Rotary positions on the first `rotary_dim` entries of each head, halves rotated against each other."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling = PlainRope()


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Softmax attention with `num_heads` queries over `num_kv_heads` keys and values (arXiv 2305.13245).

    `window`: a query at position p sees keys in (p - window, p]; None sees all.
    `softcap`: logits pass through c * tanh(logits / c).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qk_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.rope is not None and not (0 < self.rope.rotary_dim <= self.head_dim and self.rope.rotary_dim % 2 == 0):
            raise ConfigError(
                f"rotary dimension {self.rope.rotary_dim} must be even and within head_dim {self.head_dim}"
            )


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    size: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(up(x)))."""

    size: int
    activation: Activation
    bias: bool = True


Mixer = GroupedQueryAttention
FeedForward = GatedMlp | Mlp


@dataclass(frozen=True, slots=True)
class Layer:
    """x += post(mixer(pre(x))), then x += post(feed_forward(pre(x))); a missing norm is the identity."""

    mixer: Mixer
    feed_forward: FeedForward
    mixer_norm: Norm
    ffn_norm: Norm
    mixer_post_norm: Norm | None = None
    ffn_post_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding, multiplied by `scale`; `num_positions` > 0 adds a learned position table of that length.

    `scale` is exact here and is rounded to the dtype of the table before it multiplies: in bf16, Gemma's
    sqrt(3072) = 55.43 is 55.5, as the model was trained.
    """

    scale: float = 1.0
    num_positions: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """Projection to the vocabulary; `tied` reuses the token embedding."""

    tied: bool
    bias: bool = False
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder. `max_positions` is the longest context that the positions are declared for, in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Head
    embedding: Embedding = Embedding()


@dataclass(frozen=True, slots=True)
class Rename:
    """How checkpoint tensor `source` becomes program weights; `{i}` stands for the layer number.

    With several `targets` the tensor is cut along its first dimension, into as many rows as each target has.
    `transpose`: the checkpoint stores [in, out] (GPT-2's Conv1D); it is turned to [out, in] before cutting.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False
