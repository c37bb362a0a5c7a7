"""Nucleus sampling: keeps the fewest largest tokens with mass >= top_p (Holtzman et al., arXiv:1904.09751)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.core.step import SampleRow
from ridgeline.decoding.draw import integer_weights
from ridgeline.decoding.largest import largest

_TRIES_K = (64, 256, 1024)  # a nucleus is mostly this small; otherwise the whole row is sorted


class TopP:
    order: ClassVar[int] = 80

    def uses(self, row: SampleRow) -> bool:
        return row.params.top_p < 1.0

    def apply(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        using = [i for i, row in enumerate(rows) if self.uses(row)]
        device = logits_RV.device
        index_G = torch.tensor(using, device=device)
        chosen_GV = logits_RV if len(using) == len(rows) else logits_RV[index_G]  # written only once a row is done
        weights_GV = integer_weights(chosen_GV)
        totals: list[int] = weights_GV.sum(-1).tolist()
        needs = [_least_mass(rows[i].params.top_p, total) for i, total in zip(using, totals)]
        need_G1 = torch.tensor(needs, dtype=torch.int64, device=device).unsqueeze(1)
        pending_P = torch.arange(len(using), device=device)
        num_columns = logits_RV.shape[1]
        for k in (*_TRIES_K, num_columns):
            values_PK, columns_PK = largest(chosen_GV[pending_P] if len(pending_P) < len(using) else chosen_GV, k)
            weights_PK = weights_GV[pending_P.unsqueeze(1), columns_PK]
            mass_PK = weights_PK.cumsum(-1)
            needed_P1 = need_G1[pending_P]
            kept_PK = values_PK.masked_fill(mass_PK - weights_PK >= needed_P1, -torch.inf)
            done_P = (mass_PK[:, -1:] >= needed_P1).squeeze(1) | (values_PK.shape[1] == num_columns)
            target_D = index_G[pending_P[done_P]]
            logits_RV[target_D] = -torch.inf
            logits_RV[target_D.unsqueeze(1), columns_PK[done_P]] = kept_PK[done_P]
            pending_P = pending_P[~done_P]
            if pending_P.numel() == 0:
                break
        return logits_RV


def _least_mass(top_p: float, total: int) -> int:
    """ceil(top_p * total), exactly."""
    numerator, denominator = top_p.as_integer_ratio()
    return -(-numerator * total // denominator)
