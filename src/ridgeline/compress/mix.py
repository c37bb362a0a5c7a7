"""Mixed precision: which matrices get 8 bits, so that the mean is what was asked for and the KL as small as it can be.

What rounding a matrix by ΔW costs is estimated from one backward pass: with y drawn from the model's own prediction of
a token and g the gradient of log p(y) by the matrix's output, KL(model || rounded) ~ (gᵀ ΔW x)² / 2. It is the Fisher
form of the KL, without what tokens and matrices have in common.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.backends.reference.dense import DenseMemory, dense_inputs
from ridgeline.backends.reference.interpreter import compute
from ridgeline.backends.reference.tensors import as_tensor
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import rtn
from ridgeline.program.op import Program
from ridgeline.quant.stored import dequantize

MAX_TOKENS = 4096  # whose inputs and gradients are in memory at once


@dataclass(frozen=True, slots=True)
class Tap:
    """Holds inputs of a matrix [T, K], and the gradients of what it gave [T, N]."""

    x_TK: torch.Tensor
    gradient_TN: torch.Tensor

    def kl_bits(self, error_NK: torch.Tensor) -> float:
        """Estimate the KL per token of a matrix with this error, in bits."""
        return float(((self.x_TK @ error_NK.T) * self.gradient_TN).sum(-1).square().mean()) / 2 / math.log(2)


def wide_matrices(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    batches: Sequence[torch.Tensor],
    together: Sequence[frozenset[str]],
    grids: tuple[Grid, Grid],
    mean_bits: float,
    kl: float,
    seed: int,
) -> frozenset[str]:
    """Return the weights that get the second of two grids, so that all have `mean_bits` in the mean or less.

    No more get it than what the others cost together, as estimated, is `kl` bits per token. Those of a set of
    `together` are chosen as one. Weights that no linear op multiplies by stay with the first grid.
    """
    narrow, wide = grids
    taps = taps_of(program, weights, batches, frozenset[str]().union(*together), seed)
    gains: list[tuple[float, int, frozenset[str]]] = []
    for names in together:
        if names <= taps.keys():
            gain = sum(_gain(weights[name].detach(), taps[name], narrow, wide) for name in names)
            gains.append((gain, _bits(program, names, wide) - _bits(program, names, narrow), names))
    all_names = frozenset[str]().union(*together)
    room = mean_bits * sum(math.prod(program.weights[name]) for name in all_names) - _bits(program, all_names, narrow)
    chosen, left = frozenset[str](), sum(gain for gain, _, _ in gains)
    for gain, more, names in sorted(gains, key=lambda each: -each[0] / each[1]):
        if left > kl and more <= room:
            room, left, chosen = room - more, left - gain, chosen | names
    return chosen


def _gain(weight_NK: torch.Tensor, tap: Tap, narrow: Grid, wide: Grid) -> float:
    rounded = (as_tensor(dequantize(rtn.quantize(weight_NK, None, grid))) for grid in (narrow, wide))
    kl = [tap.kl_bits(values_NK - weight_NK) for values_NK in rounded]
    return kl[0] - kl[1]


def _bits(program: Program, names: Iterable[str], grid: Grid) -> int:
    return sum(8 * grid.form.num_bytes(program.weights[name]) for name in names)


def taps_of(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    batches: Sequence[torch.Tensor],
    wanted: frozenset[str],
    seed: int,
) -> dict[str, Tap]:
    """Run the program once forward and backward on at most MAX_TOKENS tokens."""
    ids_BT = torch.cat(list(batches))
    ids_BT = ids_BT[: max(1, MAX_TOKENS // ids_BT.shape[1])]
    values, memory = dense_inputs(ids_BT), DenseMemory(program.states, len(ids_BT), ids_BT.shape[1])
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with torch.enable_grad():
        for op in program.ops:
            compute(op, weights, values, memory)
            if op.kind == "embed":
                values[op.outputs[0]] = values[op.outputs[0]].detach().requires_grad_()
            elif op.kind == "linear" and op.weights[0] in wanted:
                values[op.outputs[0]].retain_grad()
                found[op.weights[0]] = (values[op.inputs[0]].detach(), values[op.outputs[0]])
        log_p_TV = values[program.result].log_softmax(-1)
        generator = torch.Generator().manual_seed(seed)
        y_T1 = torch.multinomial(log_p_TV.detach().exp(), 1, generator=generator)
        log_p_TV.gather(1, y_T1).sum().backward()
    return {name: Tap(x_TK, out.grad) for name, (x_TK, out) in found.items() if out.grad is not None}
