"""StepBatch: one step as flat arrays, the form in which every backend receives it.

Made from a StepPlan by `engine/batch.py`. numpy only.
Legend: T tokens · S spans · R rows that need logits · B blocks of the longest table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.core.step import BlockCopy

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """Where one cache group reads and writes in this step. A slot is block * block_size + offset."""

    write_slots_T: IntArray
    tables_SB: IntArray  # block ids, padded with 0
    first_token_S: IntArray  # position of the first token of each table


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Spans laid end to end. `kv_length_S` is each sequence's length once the step has run."""

    token_ids_T: IntArray
    positions_T: IntArray
    logit_rows_R: IntArray
    span_start_S: IntArray  # offset of each span in T
    span_length_S: IntArray
    kv_length_S: IntArray
    causal_S: npt.NDArray[np.bool_]
    groups: Sequence[GroupStep]
    copies: Sequence[BlockCopy]


class Executable(Protocol):
    """A program bound to weights and cache memory."""

    def run(self, step: StepBatch) -> torch.Tensor:
        """Computes the step, updates the cache, and returns logits, float32 [R, V]."""
        ...
