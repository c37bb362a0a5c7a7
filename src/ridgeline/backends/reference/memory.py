"""The states of its sequences, as an op of this backend may use them.

Implemented by the dense executable (whole sequences, no cache), by the paged one, and by the native backend for the
ops that it leaves to this one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ridgeline.backends.step import GroupStep, StepBatch

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


class InputLog:
    """The log of one part of a recurrent state, over a step: the inputs of its sequences' last tokens.

    `log_BLW` are rows of the cache's blocks: that of position p is row p % L.
    """

    def __init__(self, log_BLW: torch.Tensor, step: StepBatch, group: GroupStep) -> None:
        self._log_BLW, self._step, self._group = log_BLW, step, group

    def pending(self) -> list[torch.Tensor]:
        """Return, for each span, the logged tokens [P, W] that its state lacks."""
        starts_S = self._step.kv_length_S - self._step.span_length_S
        numbers = zip(self._group.tables_SB[:, 0], starts_S, self._group.first_token_S)
        return [self._log_BLW[block, self._rows(start - count, start)] for block, start, count in numbers]

    def keep(self, inputs_TW: torch.Tensor) -> list[bool]:
        """Log the spans of the step that go to the log alone; return which these are."""
        logged: list[bool] = []
        ends_S, blocks_S = self._step.kv_length_S, self._group.tables_SB[:, 0]
        for rows, end, block in zip(self._step.spans(), ends_S, blocks_S):
            logged.append(bool(self._group.write_slots_T[rows.start] < 0))
            if logged[-1]:
                self._log_BLW[block, self._rows(end - rows.stop + rows.start, end)] = inputs_TW[rows]
        return logged

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end) % self._log_BLW.shape[1]


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

    def log(self, state: int, part: int) -> InputLog | None:
        """Return the log of the part's inputs; None: all that a step computes goes into the state."""
        ...


ReferenceOp = Callable[[Any, Tensors, Tensors, StepMemory], Outputs]
