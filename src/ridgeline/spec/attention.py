"""Attention that caches something of every token: the keys and values of its heads, or a latent that makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.core.errors import ConfigError
from ridgeline.spec.parts import Norm, RmsNorm, Rope

QkNormPlace = Literal["head", "row", "rotated head"]


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Declares softmax attention with `num_heads` queries over `num_kv_heads` keys and values (arXiv 2305.13245).

    `qk_norm`: of queries and keys, over each head before it is rotated, over each head after it is rotated, or over the
    row of all heads, which are then cut from it.
    `window`: a query at position p sees keys in (p - window, p]; None sees all.
    `softcap`: logits pass through c * tanh(logits / c).
    `sinks`: one learned logit per query head takes part in the softmax and brings no value (arXiv 2309.17453).
    `alibi`: one slope per query head; a logit gains slope * (key position - query position) (arXiv 2108.12409).
    `output_gate`: the output is multiplied by the sigmoid of one more projection of the input, of its size.
    `kv_from`: the number of an earlier layer whose keys and values this one attends to, instead of its own
    (cross-layer attention, arXiv 2405.12981).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qk_norm: Norm | None = None
    qk_norm_over: QkNormPlace = "head"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: tuple[float, ...] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    output_gate: bool = False
    kv_from: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.alibi is not None and len(self.alibi) != self.num_heads:
            raise ConfigError(f"{len(self.alibi)} ALiBi slopes for {self.num_heads} heads")
        rope, norm = self.rope, self.qk_norm
        if rope is not None and not (0 < rope.rotary_dim <= self.head_dim and rope.rotary_dim % 2 == 0):
            raise ConfigError(f"rotary dimension {rope.rotary_dim} must be even and within head_dim {self.head_dim}")
        if norm and self.qk_norm_over == "rotated head" and not (isinstance(norm, RmsNorm) and not norm.unit_offset):
            raise ConfigError(f"the norm of rotated heads must be a plain RMSNorm, got {norm}")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Declares multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    A head's key is `nope_dim` entries made from the token's normalised latent of `kv_rank` entries and, behind them,
    `rope_dim` rotated ones that all heads share; its value is `value_dim` entries made from the latent. Queries pass
    through a normalised latent of `q_rank` entries, or come straight from the hidden state where it is None. `scale`
    multiplies q k^T as it is, any temperature of the rope included. `bias`: of the projections down and of the output.
    """

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: Rope
    norm: RmsNorm
    q_rank: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        if self.rope.rotary_dim != self.rope_dim or self.rope_dim % 2:
            raise ConfigError(
                f"latent attention rotates all of its {self.rope_dim} shared key entries in pairs; its rope has "
                f"{self.rope.rotary_dim}"
            )


def check_shared_kv(mixers: Sequence[object]) -> None:
    """Raise ConfigError where a mixer's `kv_from` names no layer, of `mixers`, whose keys and values it could read."""
    for index, mixer in enumerate(mixers):
        if not isinstance(mixer, GroupedQueryAttention) or mixer.kv_from is None:
            continue
        source = mixers[mixer.kv_from] if 0 <= mixer.kv_from < index else None
        if not isinstance(source, GroupedQueryAttention) or source.kv_from is not None:
            raise ConfigError(
                f"layer {index} reads the keys and values of layer {mixer.kv_from}; that must be an earlier layer "
                "with attention and with keys and values of its own"
            )
        own, shared = (
            f"{m.num_kv_heads} heads of {m.head_dim} entries, window {m.window or 'none'}" for m in (mixer, source)
        )
        if own != shared:
            raise ConfigError(
                f"layer {index} ({own}) cannot read the keys and values of layer {mixer.kv_from} ({shared}): "
                "heads, sizes and windows must be equal"
            )
