"""Mixed precision: which matrices get 8 bits, so that the mean is what was asked for and the KL as small as it can be.

What rounding a matrix by ΔW costs is estimated from one backward pass: with y drawn from the model's own prediction of
a token and g the gradient of log p(y) by the matrix's output, KL(model || rounded) ~ (gᵀ ΔW x)² / 2. It is the Fisher
form of the KL, without what tokens and matrices have in common.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.backends.reference.tensors import as_array, as_tensor
from ridgeline.compress.calibrate import Flow, Values, layers_of, shares_states
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import rtn
from ridgeline.core.dtypes import Array, contiguous
from ridgeline.core.files import write_whole
from ridgeline.program.op import Program
from ridgeline.quant.stored import dequantize
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.save import write_tensors

MAX_TOKENS = 4096  # whose inputs and gradients of a layer are in memory at once


@dataclass(frozen=True, slots=True)
class Tap:
    """Holds inputs of a matrix [T, K], and the gradients of what it gave [T, N]."""

    x_TK: torch.Tensor
    gradient_TN: torch.Tensor

    def kl_bits(self, error_NK: torch.Tensor) -> float:
        """Estimate the KL per token of a matrix with this error, in bits."""
        return float(((self.x_TK @ error_NK.T) * self.gradient_TN).sum(-1).square().mean()) / 2 / math.log(2)


def wide_matrices(
    sweep: "Sweep", together: Sequence[frozenset[str]], grids: tuple[Grid, Grid], mean_bits: float, kl: float
) -> frozenset[str]:
    """Return the weights that get the second of two grids, so that all have `mean_bits` in the mean or less.

    No more get it than what the others cost together, as estimated, is `kl` bits per token. Those of a set of
    `together` are chosen as one. Weights that no linear op multiplies by stay with the first grid.
    """
    narrow, wide = grids
    program, all_names = sweep.program, frozenset[str]().union(*together)
    found = sweep.estimates(all_names, lambda weight_NK, tap: _gain(weight_NK, tap, narrow, wide))
    gains: list[tuple[float, int, frozenset[str]]] = []
    for names in together:
        if names <= found.keys():
            more = _bits(program, names, wide) - _bits(program, names, narrow)
            gains.append((sum(found[name] for name in names), more, names))
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


class Sweep:
    """Computes a model once forward and backward, a layer in memory at a time, on at most MAX_TOKENS tokens.

    What layers hand on and back is in files of `folder`, so that a pass that was killed goes on from there.
    """

    def __init__(
        self, program: Program, weights: Mapping[str, Array], batches: Sequence[torch.Tensor], seed: int, folder: Path
    ) -> None:
        self.program, self._weights, self._seed, self._folder = program, weights, seed, folder
        ids_BT = torch.cat(list(batches))
        self._windows = ids_BT[: max(1, MAX_TOKENS // ids_BT.shape[1])].split(1)
        layers = layers_of(program)
        layers = [range(layers[-1].stop)] if shares_states(program) else layers
        self._parts = [*layers, range(layers[-1].stop, len(program.ops))]

    def estimates(self, wanted: frozenset[str], estimate: Callable[[torch.Tensor, Tap], float]) -> dict[str, float]:
        """Return what `estimate` says of the matrices among `wanted` that a linear op multiplies by."""
        for number in range(1, len(self._parts)):
            if not self._path("values", number).exists():
                flow = Flow(self.program, self._windows)
                flow.values = self._load("values", number - 1)
                flow.run(self._parts[number - 1], self._weights_of(number - 1))
                self._save("values", number, flow.values)
        found: dict[str, float] = {}
        for number in reversed(range(len(self._parts))):
            if not self._path("gradients", number).exists():
                self._measure(number, wanted, estimate)
            found |= json.loads(self._path("estimates", number).read_text())
        return found

    def _measure(self, number: int, wanted: frozenset[str], estimate: Callable[[torch.Tensor, Tap], float]) -> None:
        """Write the estimates of a part, and what it hands back."""
        weights = self._weights_of(number)
        taps, gradients = self._backward(number, weights, wanted)
        estimates = {name: estimate(weights[name], tap) for name, tap in taps.items()}
        write_whole(self._path("estimates", number), json.dumps(estimates).encode())
        self._save("gradients", number, gradients)

    def _backward(self, number: int, weights: Values, wanted: frozenset[str]) -> tuple[dict[str, Tap], list[Values]]:
        """Return the taps of a part, and the gradients by what it reads of those before it, of every window."""
        is_last, generator = number + 1 == len(self._parts), torch.Generator().manual_seed(self._seed)
        upstream = [] if is_last else self._load("gradients", number + 1)
        taps: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        handed_back: list[Values] = []
        for index, leaves in enumerate(self._load("values", number)):
            floats = {name: value.requires_grad_() for name, value in leaves.items() if value.is_floating_point()}
            flow = Flow(self.program, self._windows[index : index + 1])
            made: list[tuple[str, torch.Tensor, torch.Tensor]] = []
            flow.values = [leaves | floats]
            (values,) = flow.values
            with torch.enable_grad():
                for op_number in self._parts[number]:
                    op = self.program.ops[op_number]
                    x_TK = values[op.inputs[0]]
                    flow.run([op_number], weights)
                    if op.kind == "embed":
                        values[op.outputs[0]] = values[op.outputs[0]].detach().requires_grad_()
                    elif op.kind == "linear" and op.weights[0] in wanted:
                        values[op.outputs[0]].retain_grad()
                        made.append((op.weights[0], x_TK.detach(), values[op.outputs[0]]))
                if is_last:
                    log_p_TV = values[self.program.result].log_softmax(-1)
                    y_T1 = torch.multinomial(log_p_TV.detach().exp(), 1, generator=generator)
                    log_p_TV.gather(1, y_T1).sum().backward()
                else:
                    roots = {name: each for name, each in upstream[index].items() if values[name].requires_grad}
                    torch.autograd.backward([values[name] for name in roots], list(roots.values()))
            for name, x_TK, out_TN in made:
                if out_TN.grad is not None:
                    taps.setdefault(name, []).append((x_TK, out_TN.grad))
            handed_back.append({name: each.grad for name, each in floats.items() if each.grad is not None})
        return {name: Tap(*map(torch.cat, zip(*pairs))) for name, pairs in taps.items()}, handed_back

    def _weights_of(self, number: int) -> Values:
        names = {name for op in self._parts[number] for name in self.program.ops[op].weights}
        return {name: as_tensor(self._weights[name]) for name in names}

    def _path(self, what: str, number: int) -> Path:
        return self._folder / f"{what}-{number}.safetensors"

    def _save(self, what: str, number: int, values: Sequence[Values]) -> None:
        arrays = {f"{i}.{name}": contiguous(as_array(x)) for i, each in enumerate(values) for name, x in each.items()}
        write_tensors(self._path(what, number), arrays)

    def _load(self, what: str, number: int) -> list[Values]:
        if what == "values" and not number:
            return Flow(self.program, self._windows).values
        checkpoint, found = Checkpoint.of_file(self._path(what, number)), [Values() for _ in self._windows]
        for key in checkpoint.entries:
            index, _, name = key.partition(".")
            found[int(index)][name] = as_tensor(checkpoint.tensor(key))
        return found
