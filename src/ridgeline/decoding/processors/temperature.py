"""Divides by the temperature; 1 is the model's own distribution."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.core.step import SampleRow


class Temperature:
    order: ClassVar[int] = 60

    def uses(self, row: SampleRow) -> bool:
        return row.params.temperature != 1.0 and not row.params.greedy

    def apply(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        divisors = [row.params.temperature if self.uses(row) else 1.0 for row in rows]
        return logits_RV.div_(torch.tensor(divisors, device=logits_RV.device).unsqueeze(1))
