"""GPTQ: columns are rounded one by one, and those that follow make up for what each of them lost.

H = mean of x xᵀ, damped; with U the upper Cholesky factor of its inverse, rounding column i by e moves the columns
after it by e U[i, i:] / U[i, i]. Groups, and columns within a group, go in falling order of their inputs' squares, so
that the stored order is the model's own. Scales of a group are those of its columns as they are when it is reached.
Frantar et al. 2022, arXiv 2210.17323.
"""

import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn
from ridgeline.quant.stored import StoredMatrix, dequantize

NEEDS_STATISTICS = True
BLOCK = 128  # columns at a time where groups are larger
DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean of the diagonal, tried until H has a Cholesky factor
DOUBLE_UP_TO = 2048  # inputs: larger matrices are factored in float32
balance = rtn.balance


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> StoredMatrix:
    """Return the better of GPTQ and rounding to nearest, by what they change of the outputs."""
    plain = rtn.quantize(weight_NK, None, grid)
    if statistics is None:
        return plain
    found = _quantize(weight_NK.float(), statistics, grid)
    if found is None:
        return plain
    losses = [statistics.loss(torch.from_numpy(dequantize(each)) - weight_NK) for each in (found, plain)]
    return found if losses[0] <= losses[1] else plain


def _quantize(weight_NK: torch.Tensor, statistics: Statistics, grid: Grid) -> StoredMatrix | None:
    num_inputs = weight_NK.shape[1]
    group = grid.form.group or num_inputs
    diagonal_K = statistics.hessian_KK.diagonal()
    dead_K = diagonal_K == 0
    diagonal_K = torch.where(dead_K, 1.0, diagonal_K)
    order_K = _order(diagonal_K, group)
    importance_K = diagonal_K[order_K]
    upper_KK = upper_factor(statistics.hessian_KK[order_K[:, None], order_K], importance_K)
    if upper_KK is None:
        return None
    w_NK = torch.where(dead_K, 0.0, weight_NK)[:, order_K]
    codes_NK = torch.empty_like(w_NK)
    scales: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []
    for begin in range(0, num_inputs, min(group, BLOCK)):
        part = slice(begin, min(begin + min(group, BLOCK), num_inputs))
        if begin % group == 0:
            members = slice(begin, begin + group)
            scale_N1, zero_N1 = grid.fit(w_NK[:, None, members], importance_K[None, members].float())
            scales.append(scale_N1)
            zeros.append(zero_N1)
        codes_NK[:, part], errors_NB = _round_block(w_NK[:, part], upper_KK[part, part], scales[-1], zeros[-1], grid)
        w_NK[:, part.stop :] -= errors_NB @ upper_KK[part, part.stop :]
    back_K = order_K.argsort()
    back_G = (order_K[::group] // group).argsort()
    scale_NG, zero_NG = torch.cat(scales, 1)[:, back_G], torch.cat(zeros, 1)[:, back_G]
    return grid.stored(codes_NK[:, back_K], scale_NG, zero_NG)


def _round_block(
    w_NB: torch.Tensor, upper_BB: torch.Tensor, scale_N1: torch.Tensor, zero_N1: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and errors of a block of columns, each error divided by its column's entry of the diagonal."""
    w_NB, codes_NB, errors_NB = w_NB.clone(), torch.empty_like(w_NB), torch.empty_like(w_NB)
    for column in range(w_NB.shape[1]):
        w_N11 = w_NB[:, column, None, None]
        codes_N11 = grid.codes(w_N11, scale_N1, zero_N1)
        error_N = (w_N11 - grid.values(codes_N11, scale_N1, zero_N1)).flatten() / upper_BB[column, column]
        w_NB[:, column:] -= torch.outer(error_N, upper_BB[column, column:])
        codes_NB[:, column], errors_NB[:, column] = codes_N11.flatten(), error_N
    return codes_NB, errors_NB


def _order(diagonal_K: torch.Tensor, group: int) -> torch.Tensor:
    """Return the order of columns: groups by falling mean, then the columns of each by falling value."""
    d_GS = diagonal_K.unflatten(0, (-1, group))
    within_GS = d_GS.argsort(dim=1, descending=True, stable=True)
    groups_G = d_GS.mean(1).argsort(descending=True, stable=True)
    return (within_GS + group * torch.arange(len(d_GS))[:, None])[groups_G].flatten()


def upper_factor(hessian_KK: torch.Tensor, diagonal_K: torch.Tensor) -> torch.Tensor | None:
    """Return U with Uᵀ U the inverse of the damped matrix, whose diagonal is given, float32.

    None where no damping makes it invertible. Two more matrices as large are in memory, whatever is tried.
    """
    work_KK = hessian_KK.double() if len(hessian_KK) <= DOUBLE_UP_TO else hessian_KK.clone()
    factor_KK, info = torch.empty_like(work_KK), torch.empty((), dtype=torch.int32)
    diagonal_K = diagonal_K.to(work_KK.dtype)
    for damping in DAMPINGS:
        work_KK.copy_(hessian_KK)
        work_KK.diagonal().copy_(diagonal_K + damping * diagonal_K.mean())
        torch.linalg.cholesky_ex(work_KK, out=(factor_KK, info))
        if not info:
            torch.cholesky_inverse(factor_KK, out=work_KK)
            torch.linalg.cholesky_ex(work_KK, upper=True, out=(factor_KK, info))
            if not info and bool(factor_KK.isfinite().all()):
                return factor_KK.float()
    return None
