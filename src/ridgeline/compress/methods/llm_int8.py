"""LLM.int8(): weights of 8 bits by a scale of each output, for inputs of 8 bits but for columns of outliers, of 16.

A column is one where any input of the calibration text has a magnitude of THRESHOLD or more; of many the largest few.
Dettmers et al. 2022, arXiv 2208.07339, which looks for them in every batch.
"""

from dataclasses import replace

import numpy as np
import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn
from ridgeline.quant.stored import StoredMatrix
from ridgeline.weights.packing.outliers import with_outliers

NEEDS_STATISTICS = True
FORMAT = "llm-int8"
THRESHOLD = 6.0
MAX_SHARE = 1 / 32  # of the inputs; the paper has 0.1 to 1 % of them
balance = rtn.balance


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> StoredMatrix:
    """Round to nearest by largest magnitudes over 127, and say which inputs keep 16 bits."""
    stored = rtn.quantize(weight_NK, None, replace(grid, scale_dtype=torch.float32))
    if statistics is None:
        return stored
    size_K = statistics.max_abs_K.numpy()
    largest_K = np.argsort(-size_K, kind="stable")[: int(len(size_K) * MAX_SHARE)]
    return with_outliers(stored, np.sort(largest_K[size_K[largest_K] >= THRESHOLD]).astype(np.int32))
