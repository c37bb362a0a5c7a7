"""The states of its sequences, as an op of this backend may use them.

Implemented by the dense executable (whole sequences, no cache), by the paged one, and by the native backend for the
ops that it leaves to this one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ridgeline.program.op import Attrs
from ridgeline.program.ops.attention import AttentionAttrs

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class LatentSpans:
    """Equally long spans of a step and what a latent state holds of their sequences.

    `rows_SQ` are their rows of T, `entries_SLE` the latents and rotated keys of up to L tokens, finite also beyond a
    sequence's end, and `mask_SQL` is 0 where a query sees a token and -inf elsewhere.
    """

    rows_SQ: torch.Tensor
    entries_SLE: torch.Tensor
    mask_SQL: torch.Tensor


class StepMemory(Protocol):
    """Gives access to the memory of one step's sequences; tokens of a span lie side by side in T."""

    def write(self, state: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Store the step's keys and values of state `state`."""
        ...

    def attend(
        self,
        attrs: AttentionAttrs,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention of the step's queries over all that `attrs.state` holds of their sequences, [T, N, D]."""
        ...

    def write_latent(self, state: int, entries_TE: torch.Tensor) -> None:
        """Store the step's latents, their rotated keys behind them, of latent state `state`."""
        ...

    def latents(self, state: int, dtype: torch.dtype) -> Iterable[LatentSpans]:
        """Return all that latent state `state` holds of the step's sequences, in `dtype`; every span once."""
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


ReferenceOp = Callable[[Attrs, Tensors, Tensors, StepMemory], tuple[torch.Tensor, ...]]
