"""StepBatch and StepOutput: one step as flat arrays, what every backend receives and gives back.

Made from a StepPlan by `engine/batch.py`; the output is read by the sampler.
Legend: T tokens · S spans · R rows that need logits · D tokens to draw · V vocabulary · B blocks of the longest table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.core.step import BlockCopy
from ridgeline.cost.roofline import OpTiming

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """Where one cache group reads and writes in this step. A slot is block * block_size + offset.

    In a recurrent group a table is one block, the state of the span's sequence, and a slot is that block.
    """

    write_slots_T: IntArray
    tables_SB: IntArray  # block ids, padded with 0
    first_token_S: IntArray  # position of the first token of each table


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Tokens that a backend may decide within the step, by the rules of `ridgeline.decoding`; each array is [D].

    Only what needs nothing but the row's logits is here. top_p and min_p are float64, as the rules compare them.
    """

    logit_row: IntArray  # index into the R rows
    temperature: npt.NDArray[np.float32]  # 0: greedy
    top_k: npt.NDArray[np.int32]  # 0: off
    top_p: npt.NDArray[np.float64]  # 1: off
    min_p: npt.NDArray[np.float64]  # 0: off
    seed: npt.NDArray[np.uint64]
    num_output: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Spans laid end to end. `kv_length_S` is each sequence's length once the step has run."""

    token_ids_T: IntArray
    positions_T: IntArray
    logit_rows_R: IntArray
    span_start_S: IntArray  # offset of each span in T
    span_length_S: IntArray
    kv_length_S: IntArray
    mutual_S: IntArray
    groups: Sequence[GroupStep]
    copies: Sequence[BlockCopy]
    draws: DrawRows
    adapters_T: IntArray | None = None  # number of each token's adapter, 0 for none; None: no token has one

    @property
    def adapters_or_none_T(self) -> IntArray:
        """`adapters_T`, zeros where no token has an adapter."""
        return self.adapters_T if self.adapters_T is not None else np.zeros(len(self.token_ids_T), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed. `drawn` holds one token per row of the batch's `draws`, -1 where the logits were not finite
    (NaN or +inf anywhere, or -inf everywhere); it is None from a backend that leaves every token to the sampler.
    The logits are good until the executable's next step.
    """

    logits_RV: torch.Tensor  # float32
    drawn: IntArray | None = None


class Executable(Protocol):
    """A program bound to weights and cache memory."""

    def run(self, step: StepBatch) -> StepOutput:
        """Computes the step and updates the cache."""
        ...

    def timed(self, step: StepBatch) -> tuple[StepOutput, list[OpTiming]]:
        """`run`, and how long each part of it took; slower by what the clock costs."""
        ...
