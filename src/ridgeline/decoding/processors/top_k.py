"""Keeps the k largest logits."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.core.step import SampleRow
from ridgeline.decoding.largest import largest


class TopK:
    order: ClassVar[int] = 50

    def uses(self, row: SampleRow) -> bool:
        return row.params.top_k > 0

    def apply(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        num_columns = logits_RV.shape[1]
        using = [i for i, row in enumerate(rows) if 0 < row.params.top_k < num_columns]
        if not using:
            return logits_RV
        device = logits_RV.device
        index_G = torch.tensor(using, device=device)
        k_G1 = torch.tensor([rows[i].params.top_k for i in using], device=device).unsqueeze(1)
        values_GK, columns_GK = largest(logits_RV[index_G], int(k_G1.max()))
        dropped_GK = torch.arange(values_GK.shape[1], device=device) >= k_G1
        logits_RV[index_G] = -torch.inf
        logits_RV[index_G.unsqueeze(1), columns_GK] = values_GK.masked_fill(dropped_GK, -torch.inf)
        return logits_RV
