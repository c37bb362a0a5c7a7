"""A Program is a list of ops over named values with symbolic dimensions.

Legend: T tokens in the step · R rows that need logits. All other dimensions are numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

Dim = int | str
Shape = tuple[Dim, ...]

TOKEN_IDS = "token_ids"  # int [T]
POSITIONS = "positions"  # int [T]
ADAPTERS = "adapters"  # int [T], 0: none, else the number of the adapter, from 1
LOGIT_ROWS = "logit_rows"  # int [R], indices into T
LOGITS = "logits"  # float32 [R, V]
FEATURES = "features"  # [T, W], hidden states of another program; an input of the programs that read it
STEP_INPUTS: Mapping[str, Shape] = {TOKEN_IDS: ("T",), POSITIONS: ("T",), ADAPTERS: ("T",), LOGIT_ROWS: ("R",)}


def dims_of(shape: Shape) -> tuple[int, ...]:
    """Return the dimensions of a value's rows, which are numbers."""
    return tuple(dim for dim in shape[1:] if isinstance(dim, int))


@dataclass(frozen=True, slots=True)
class Attrs:
    """The attributes of an op are everything but its operands. Each kind of op has its own subclass, in `ops/`."""


@dataclass(frozen=True, slots=True)
class Plain(Attrs):
    """Stands for no attributes."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: `kind` names its row in the op table, `label` says where in the model it stands."""

    kind: str
    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    attrs: Attrs = Plain()


@dataclass(frozen=True, slots=True)
class KvState:
    """The KV cache that one layer has: `num_heads` keys and values of `head_dim` entries for every token.

    With a `window` (sliding window attention), only for the tokens that later queries can still attend to.
    """

    num_heads: int
    head_dim: int
    window: int | None

    def bytes_per_token(self, element_bytes: float) -> int:
        """Return the bytes of a token; entries of 8 bits or less share a bfloat16 scale by key and value of a head."""
        scale_bytes = 2 if element_bytes < 2 else 0
        return int(2 * self.num_heads * (self.head_dim * element_bytes + scale_bytes))


@dataclass(frozen=True, slots=True)
class LatentState:
    """The KV cache that an MLA layer has: a compressed latent and one rotated key for all heads, for every token."""

    latent_dim: int
    rope_dim: int

    @property
    def window(self) -> None:
        """Return None: latents are cached for every token."""

    def bytes_per_token(self, element_bytes: float) -> int:
        return int((self.latent_dim + self.rope_dim) * element_bytes)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State of one recurrent layer per sequence, of any length: float32 tensors of these shapes, zero at its start.

    `logged` is how many inputs of a token each part depends on, so that they can be applied to it later.
    """

    parts: tuple[tuple[int, ...], ...]
    logged: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.parts)

    @property
    def logged_bytes(self) -> int:
        """Return the bytes of a token in the log of its inputs."""
        return 4 * sum(self.logged)


State = KvState | LatentState | RecurrentState


@dataclass(frozen=True, slots=True)
class Program:
    """The whole forward pass as a flat list, in the order of computation.

    `shapes` gives every value's shape, `weights` every weight's shape, `states` the memory of each layer.
    """

    ops: tuple[Op, ...]
    shapes: Mapping[str, Shape]
    weights: Mapping[str, tuple[int, ...]]
    states: tuple[State, ...]
    vocab_size: int
    context_length: int
    taps: tuple[str, ...] = ()  # values [T, H] that are retained to the end of a step, beside its result

    @property
    def result(self) -> str:
        """The value that a step is computed for: the logits, or without a head the last layer's output."""
        return self.ops[-1].outputs[0]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights.values())
