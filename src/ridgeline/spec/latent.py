"""Multi-head latent attention caches one compressed latent per token instead of the keys and values of its
heads.
"""

from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.spec.parts import RmsNorm, Rope


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
