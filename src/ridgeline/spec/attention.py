"""Attention that keeps the keys and values of its tokens."""

from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.spec.parts import Norm, Rope


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Softmax attention with `num_heads` queries over `num_kv_heads` keys and values (arXiv 2305.13245).

    `window`: a query at position p sees keys in (p - window, p]; None sees all.
    `softcap`: logits pass through c * tanh(logits / c).
    `alibi`: one slope per query head; a logit gains slope * (key position - query position) (arXiv 2108.12409).
    `output_gate`: the output is multiplied by the sigmoid of one more projection of the input, of its size.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qk_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    output_gate: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.alibi is not None and len(self.alibi) != self.num_heads:
            raise ConfigError(f"{len(self.alibi)} ALiBi slopes for {self.num_heads} heads")
        if self.rope is not None and not (0 < self.rope.rotary_dim <= self.head_dim and self.rope.rotary_dim % 2 == 0):
            raise ConfigError(
                f"rotary dimension {self.rope.rotary_dim} must be even and within head_dim {self.head_dim}"
            )
