"""The states of its sequences, as an op of this backend may use them.

Implemented by the dense executable (whole sequences, no cache), by the paged one, and by the native backend for the
ops that it leaves to this one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Tensors = Sequence[torch.Tensor]
Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class CachedSpans:
    """Equally long spans of a step, and what a state holds of their sequences.

    `rows_SQ` are their rows of T. `entries` are keys and values [S, K, L, D] of up to L tokens, finite also beyond a
    sequence's end; of a latent state the first are the latents with their rotated keys, as of one head. `mask_SQL` is 0
    where a query sees a token and -inf elsewhere. `is_causal`: that is what causal attention over whole sequences sees.
    """

    rows_SQ: torch.Tensor
    entries: tuple[torch.Tensor, ...]
    query_positions_SQ: torch.Tensor
    key_positions_SL: torch.Tensor
    mask_SQL: torch.Tensor
    is_causal: bool = False


class StepMemory(Protocol):
    """Gives access to the memory of one step's sequences; tokens of a span lie side by side in T."""

    def write(self, state: int, *entries_TKD: torch.Tensor) -> None:
        """Store the step's keys and values of state `state`, or its latents."""
        ...

    def cached(self, state: int, dtype: torch.dtype, window: int | None = None) -> Iterable[CachedSpans]:
        """Return all that state `state` holds of the step's sequences, in `dtype`; every span once."""
        ...

    def spans(self) -> Sequence[slice]:
        """Return the rows of T that each span of the step has."""
        ...

    def load(self, state: int, part: int) -> torch.Tensor:
        """Return part `part` of recurrent state `state` before the step, float32 [S, *shape]; 0 where one begins."""
        ...

    def store(self, state: int, part: int, value_S: torch.Tensor) -> None:
        """Store what `load` gives to the next step of the same sequences."""
        ...


ReferenceOp = Callable[[Any, Tensors, Tensors, StepMemory], Outputs]
