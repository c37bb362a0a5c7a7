"""Keeps tokens at least `min_p` times as likely as the likeliest (Nguyen et al., arXiv:2407.01082)."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.core.step import SampleRow


class MinP:
    order: ClassVar[int] = 70

    def uses(self, row: SampleRow) -> bool:
        return row.params.min_p > 0.0

    def apply(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        # p >= min_p * p_max in logits: no softmax, and min_p = 1 keeps exactly the ties of the maximum.
        margins = [math.log(row.params.min_p) if self.uses(row) else -math.inf for row in rows]
        floor_R1 = logits_RV.amax(-1, keepdim=True) + torch.tensor(margins, device=logits_RV.device).unsqueeze(1)
        return logits_RV.masked_fill_(logits_RV < floor_R1, -torch.inf)
