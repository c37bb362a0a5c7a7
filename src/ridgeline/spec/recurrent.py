"""Mixers with a recurrent state of fixed size per sequence instead of a KV cache."""

from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.spec.parts import Activation, Norm

MIN_TAPS = 2  # a convolution over less is a factor


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba's selective scan (arXiv 2312.00752): `inner_size` channels, each with a state of `state_size` entries.

    The step size of a channel comes through a bottleneck of `dt_rank`. `inner_norm` is applied to that and to B and C.
    """

    inner_size: int
    state_size: int
    dt_rank: int
    conv_taps: int
    activation: Activation
    conv_bias: bool = True
    bias: bool = False
    inner_norm: Norm | None = None

    def __post_init__(self) -> None:
        _check_taps(self.conv_taps)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2's state-space duality (arXiv 2405.21060): `num_heads` heads of `head_dim` channels.

    The heads of each of `num_groups` groups share B and C, of `state_size` entries. The step size is clamped to
    `dt_limits`. The gate multiplies before an RMSNorm over each group's channels.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_taps: int
    activation: Activation
    norm_eps: float
    dt_limits: tuple[float, float]
    conv_bias: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        _check_taps(self.conv_taps)
        if self.num_heads % self.num_groups:
            raise ConfigError(f"{self.num_heads} heads of Mamba-2 do not fit into {self.num_groups} equal groups")


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Gated delta rule (arXiv 2412.06464): each of `num_value_heads` heads keeps [key_dim, value_dim] entries.

    Value heads that share one of the `num_key_heads` lie side by side. Queries, keys and values pass a causal
    convolution; the output is normalised by head and then multiplied by silu of the gate.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    activation: Activation
    norm_eps: float

    def __post_init__(self) -> None:
        _check_taps(self.conv_taps)
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads ({self.num_value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.num_key_heads})"
            )


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """Linear attention whose heads forget at constant rates (arXiv 2405.17381).

    At every token the state of head h shrinks to exp(-rates[h]) of itself. The output is normalised and then
    multiplied by sigmoid of a gate; `activation` is applied to queries, keys and values.
    """

    head_dim: int
    rates: tuple[float, ...]
    activation: Activation
    norm: Norm

    @property
    def num_heads(self) -> int:
        return len(self.rates)


RecurrentMixer = Mamba | Mamba2 | GatedDeltaNet | LightningAttention


def _check_taps(taps: int) -> None:
    if taps < MIN_TAPS:
        raise ConfigError(f"a causal convolution needs a kernel of at least {MIN_TAPS}, got {taps}")
