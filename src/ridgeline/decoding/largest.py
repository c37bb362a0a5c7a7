"""The largest logits of each row, exactly, ties to the lower column. Called by the sampler, processors and logprobs.

A row is first cut into blocks whose maxima are one vectorized pass; only the few blocks that can hold the answer are
looked at again. Legend: R rows, V columns, M blocks taken, K wanted.
"""

import torch
from torch import Tensor

_BLOCK = 128  # columns per block
_SORT_ALL = 1024  # rows this short are sorted whole


def argmax(logits_RV: Tensor) -> Tensor:
    """Column of the largest value of each row, int64 [R]; the lowest such column; the first NaN where there is one."""
    maxima_RB = _block_maxima(logits_RV)
    if maxima_RB.shape[1] == 0:
        return logits_RV.argmax(-1)
    values_RC, columns_RC = _open_blocks(logits_RV, maxima_RB.argmax(-1, keepdim=True))
    return columns_RC.gather(1, values_RC.argmax(-1, keepdim=True)).squeeze(1)


def largest(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest values and their columns, [R, min(k, V)], by value descending, then column ascending.

    Which of several -inf columns are returned is left open.
    """
    num_columns = logits_RV.shape[1]
    k = min(k, num_columns)
    slack = 8  # a few more than k: when the k-th value also ends the longer list, ties may lie outside of it
    while True:
        take = k + slack
        if num_columns <= _SORT_ALL or take >= num_columns:
            values_RV, columns_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
            return values_RV[:, :k], columns_RV[:, :k]
        values_RM, columns_RM = _some_largest(logits_RV, take)
        kth_R, last_R = values_RM[:, k - 1], values_RM[:, -1]
        if not bool(((kth_R == last_R) & (last_R > -torch.inf)).any()):
            break
        slack *= 8
    columns_RM, by_column_RM = columns_RM.sort(-1)
    values_RM, by_value_RM = values_RM.gather(1, by_column_RM).sort(dim=-1, descending=True, stable=True)
    return values_RM[:, :k], columns_RM.gather(1, by_value_RM)[:, :k]


def _some_largest(logits_RV: Tensor, take: int) -> tuple[Tensor, Tensor]:
    """As `largest`, but ties with the last value fall anyhow.

    A value above the last one lies in one of the `take` blocks of largest maximum: those maxima are `take` values.
    """
    maxima_RB = _block_maxima(logits_RV)
    if 4 * take >= maxima_RB.shape[1]:  # most blocks would be opened: look at the row itself
        values_RM, columns_RM = logits_RV.topk(take)
        return values_RM, columns_RM
    values_RC, columns_RC = _open_blocks(logits_RV, maxima_RB.topk(take).indices)
    values_RM, at_RM = values_RC.topk(take)
    return values_RM, columns_RC.gather(1, at_RM)


def _blocks(logits_RV: Tensor) -> Tensor:
    """View [R, B, _BLOCK] of the whole blocks; up to _BLOCK - 1 columns remain as the tail."""
    num_blocks = logits_RV.shape[1] // _BLOCK
    return logits_RV[:, : num_blocks * _BLOCK].unflatten(1, (num_blocks, _BLOCK))


def _block_maxima(logits_RV: Tensor) -> Tensor:
    return _blocks(logits_RV).amax(-1)


def _open_blocks(logits_RV: Tensor, blocks_RM: Tensor) -> tuple[Tensor, Tensor]:
    """Values and columns of the given blocks, in the order given, and of the tail, which is always included."""
    num_rows, num_columns = logits_RV.shape
    device = logits_RV.device
    row_R1 = torch.arange(num_rows, device=device).unsqueeze(1)
    values_RC = _blocks(logits_RV)[row_R1, blocks_RM].flatten(1)
    columns_RC = (blocks_RM.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK, device=device)).flatten(1)
    tail_start = num_columns // _BLOCK * _BLOCK
    if tail_start == num_columns:
        return values_RC, columns_RC
    tail_RC = torch.arange(tail_start, num_columns, device=device).expand(num_rows, -1)
    return torch.cat((values_RC, logits_RV[:, tail_start:]), 1), torch.cat((columns_RC, tail_RC), 1)
