"""The parts of a Program: ops over named values with symbolic dimensions.

Legend: T tokens in the step · R rows that need logits. All other dimensions are numbers.
Built by `lower.py`, rewritten by `passes/`, priced by `cost/`, executed by `backends/`. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.spec.spec import Activation

Dim = int | str
Shape = tuple[Dim, ...]

TOKEN_IDS = "token_ids"  # int [T]
POSITIONS = "positions"  # int [T]
LOGIT_ROWS = "logit_rows"  # int [R], indices into T
LOGITS = "logits"  # float32 [R, V]
STEP_INPUTS: Mapping[str, Shape] = {TOKEN_IDS: ("T",), POSITIONS: ("T",), LOGIT_ROWS: ("R",)}


@dataclass(frozen=True, slots=True)
class Plain:
    """An op without attributes."""


@dataclass(frozen=True, slots=True)
class EmbedAttrs:
    """`scale` is rounded to the dtype of the table before it multiplies."""

    scale: float


@dataclass(frozen=True, slots=True)
class NormAttrs:
    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class SplitHeadsAttrs:
    """[T, heads * head_dim] seen as [T, heads, head_dim]."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class RopeAnglesAttrs:
    """Angular frequencies in radians per position, and the factor on cos and sin."""

    frequencies: tuple[float, ...] = field(repr=False)
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class KvWriteAttrs:
    """Keys and values go to KV state number `state`."""

    state: int


@dataclass(frozen=True, slots=True)
class AttentionAttrs:
    """Queries attend to KV state number `state`; window and softcap as in GroupedQueryAttention."""

    state: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class ActivationAttrs:
    function: Activation


@dataclass(frozen=True, slots=True)
class SoftcapAttrs:
    cap: float


Attrs = (
    Plain
    | EmbedAttrs
    | NormAttrs
    | SplitHeadsAttrs
    | RopeAnglesAttrs
    | KvWriteAttrs
    | AttentionAttrs
    | ActivationAttrs
    | SoftcapAttrs
)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `kind` names its row in the op table; `label` says where in the model it stands."""

    kind: str
    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    attrs: Attrs = Plain()


@dataclass(frozen=True, slots=True)
class KvState:
    """What one layer keeps of every token: `num_heads` keys and values of `head_dim` entries each."""

    num_heads: int
    head_dim: int
    window: int | None

    def bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class Program:
    """The whole forward pass as a flat list, in the order of computation.

    `shapes` gives every value's shape, `weights` every weight's shape, `states` the KV memory of each layer.
    """

    ops: tuple[Op, ...]
    shapes: Mapping[str, Shape]
    weights: Mapping[str, tuple[int, ...]]
    states: tuple[KvState, ...]
    vocab_size: int
    context_length: int

    @property
    def num_parameters(self) -> int:
        return sum(_product(shape) for shape in self.weights.values())


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count
