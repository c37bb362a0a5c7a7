"""Quantize the matrices of one layer in the order in which it computes, each on the inputs that it will really see.

Matrices that read one value share its statistics. Where a method balances inputs, the norm that makes them is divided,
and every matrix that reads them multiplied: what the layer computes stays the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ridgeline.backends.reference.ops.experts import gated
from ridgeline.backends.reference.tensors import as_tensor
from ridgeline.compress.calibrate import Flow, readers, statistics_of
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Method, Statistics, rtn, wanda
from ridgeline.core.dtypes import Array
from ridgeline.program.op import Op, Program
from ridgeline.program.ops.dense import NORMS, NormAttrs
from ridgeline.program.ops.experts import ExpertsAttrs
from ridgeline.quant.stored import StoredMatrix, dequantize

Key = tuple[str, int | None]
"""A matrix of the program: its weight, and which expert of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixReport:
    """Says how a matrix came out. `error_ratio`: what it changes of its outputs, beside rounding to nearest, or
    of zeros beside those of the least weights.

    None where that is not known, as of experts that no token of the calibration text went to.
    """

    name: str
    bits: int
    rows: int
    error_ratio: float | None


@dataclass(slots=True)
class QuantizedLayer:
    """Holds a layer's quantized matrices, the plain weights that were changed, and how it went.

    `effective` has all its weights as they are computed with from here on, stacks of experts as copies.
    """

    effective: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    matrices: dict[Key, StoredMatrix] = field(default_factory=dict[Key, StoredMatrix])
    changed: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    reports: list[MatrixReport] = field(default_factory=list[MatrixReport])


class LayerQuantizer:
    """Quantizes weights of layers of one program by one method; `dtype` is that of plain weights.

    `grids` has those of the weights that are quantized, one for all that run as one matrix.
    """

    def __init__(self, program: Program, method: Method, grids: Mapping[str, Grid], dtype: torch.dtype) -> None:
        self._program, self._method, self._grids, self._dtype = program, method, grids, dtype
        self._chosen = frozenset(grids)

    def quantize(self, ops: range, flow: Flow, weights: Mapping[str, Array]) -> QuantizedLayer:
        """Run a layer's ops on `flow` with float32 `weights`, quantizing its matrices on the way.

        Where nothing has to be computed, memory holds one of the weights at a time.
        """
        made, done = QuantizedLayer(), set[str]()
        members = [self._program.ops[number] for number in ops]
        names = dict.fromkeys(name for op in members for name in op.weights)

        def read(name: str) -> torch.Tensor:
            weight = as_tensor(weights[name])
            return weight.clone() if weight.ndim == 3 else weight  # experts are replaced one by one, in place

        if not self._method.NEEDS_STATISTICS:
            for name in filter(self._chosen.__contains__, names):
                made.effective = {name: read(name)}
                for key, weight_NK in _matrices(name, made.effective[name]):
                    self._one(key, weight_NK, None, None, made)
            return made
        made.effective = {name: read(name) for name in names}
        for number, op in zip(ops, members, strict=True):
            if not self._chosen.isdisjoint(op.weights):
                value = op.inputs[1 if op.kind == "latent_attention" else 0]
                if value not in done:
                    done.add(value)
                    self._matrices_of(value, members, flow, made)
                if op.kind == "experts" and op.weights[2] in self._chosen:
                    self._down_of(op, flow, made)
            flow.run([number], made.effective)
        return made

    def _matrices_of(self, value: str, ops: Sequence[Op], flow: Flow, made: QuantizedLayer) -> None:
        """Quantize all matrices that read a value; of experts those of gate and up."""
        rows = flow.rows(value)
        statistics = statistics_of(rows)
        assert statistics is not None, "there is a calibration text"
        reading = [op for op in ops if value in op.inputs and not self._chosen.isdisjoint(op.weights)]
        names = {
            name: op
            for op in reading
            for name in (op.weights[:2] if op.kind == "experts" else op.weights[:1])
            if name in self._chosen
        }
        s_K = self._balanced(value, list(names), statistics, made)
        for name, op in names.items():
            for key, weight_NK in _matrices(name, made.effective[name]):
                of_matrix = statistics
                if op.kind == "experts":
                    pairs = zip(rows, flow.values)
                    of_matrix = statistics_of([x_TK[_routed(op, values, key[1])] for x_TK, values in pairs])
                self._one(key, weight_NK, of_matrix, s_K, made)

    def _down_of(self, op: Op, flow: Flow, made: QuantizedLayer) -> None:
        """Quantize the last matrix of every expert on what gate and up, quantized already, make of its tokens."""
        attrs = op.attrs
        assert isinstance(attrs, ExpertsAttrs)
        gate, up, down, *biases = (made.effective[name] for name in op.weights[:5])
        for key, weight_NK in _matrices(op.weights[2], down):
            expert = key[1]
            assert expert is not None
            own = [bias[expert] for bias in biases] or [None, None]
            rows: list[torch.Tensor] = []
            for x_TK, values in zip(flow.rows(op.inputs[0]), flow.values):
                x = x_TK[_routed(op, values, expert)]
                linear = torch.nn.functional.linear
                rows.append(gated(attrs, linear(x, gate[expert], own[0]), linear(x, up[expert], own[1])))
            self._one(key, weight_NK, statistics_of(rows), None, made)

    def _one(
        self,
        key: Key,
        weight_NK: torch.Tensor,
        statistics: Statistics | None,
        s_K: torch.Tensor | None,
        made: QuantizedLayer,
    ) -> None:
        """Quantize a matrix whose inputs are divided by `s_K` where it is stored, and are not yet in this flow."""
        name, expert = key
        scaled_NK, of_scaled, ratio = weight_NK, statistics, None
        if s_K is not None:
            scaled_NK = weight_NK * s_K
            of_scaled = None if statistics is None else statistics.divided(s_K)
        stored = self._method.quantize(scaled_NK, of_scaled, self._grids[name])
        if isinstance(stored, torch.Tensor):
            bits, values_NK = torch.finfo(self._dtype).bits, stored.to(self._dtype).float()
        else:
            bits, values_NK = stored.format.bits, as_tensor(dequantize(stored))
            made.matrices[key] = stored
        values_NK = values_NK if s_K is None else values_NK / s_K
        if statistics is not None:
            if isinstance(stored, torch.Tensor):
                plain = wanda.by_magnitude(weight_NK)
            else:
                plain = as_tensor(dequantize(rtn.quantize(weight_NK, None, self._grids[name])))
            by_rounding = statistics.loss(plain - weight_NK)
            ratio = statistics.loss(values_NK - weight_NK) / by_rounding if by_rounding else 1.0
        num_rows = statistics.num_rows if statistics else 0
        spelled = name if expert is None else f"{name}[{expert}]"
        made.reports.append(MatrixReport(name=spelled, bits=bits, rows=num_rows, error_ratio=ratio))
        if expert is None:
            made.effective[name] = values_NK
        else:
            made.effective[name][expert] = values_NK
        if isinstance(stored, torch.Tensor):
            made.changed[name] = made.effective[name]

    def _balanced(
        self, value: str, names: Sequence[str], statistics: Statistics, made: QuantizedLayer
    ) -> torch.Tensor | None:
        """Return by what the value is divided from now on, with its norm and its other readers changed so."""
        effective = made.effective
        norm = next((op for op in self._program.ops if value in op.outputs), None)
        if norm is None or not self._can_divide(norm, value):
            return None
        reading = [effective[name].flatten(0, -2) for name in names]
        s_K = self._method.balance(reading, statistics, self._grids[names[0]])
        if s_K is None:
            return None
        assert isinstance(norm.attrs, NormAttrs)
        offset = 1.0 if norm.attrs.unit_offset else 0.0
        weight_K = effective[norm.weights[0]].float()
        divided_K = ((weight_K + offset) / s_K - offset).to(self._dtype).float()
        exact_K = (weight_K + offset) / (divided_K + offset)  # what the rounded norm really divides by
        usable_K = exact_K.isfinite() & (exact_K > 0)
        s_K = torch.where(usable_K, exact_K, 1.0)
        made.changed[norm.weights[0]] = torch.where(usable_K, divided_K, weight_K)
        if len(norm.weights) > 1:
            made.changed[norm.weights[1]] = effective[norm.weights[1]] / s_K
        for op in readers(self._program, value):
            if op.weights[0] not in names:
                made.changed[op.weights[0]] = effective[op.weights[0]] * s_K
        return s_K

    def _can_divide(self, norm: Op, value: str) -> bool:
        """Tell whether the norm's output is read by matrices alone, which no other op uses."""
        users = [op for op in self._program.ops if norm.weights and norm.weights[0] in op.weights]
        reading = readers(self._program, value)
        return (
            norm.kind in NORMS
            and len(users) == 1
            and (norm.kind == "layernorm" or len(norm.weights) == 1)
            and self._program.weights[norm.weights[0]] == (self._program.shapes[value][-1],)
            and all(
                op.kind == "linear" or (op.kind == "experts" and self._chosen.issuperset(op.weights[:2]))
                for op in reading
            )
        )


def _matrices(name: str, weight: torch.Tensor) -> list[tuple[Key, torch.Tensor]]:
    """Return the matrices of a weight: itself, or those of a stack of experts."""
    if weight.ndim == 2:
        return [((name, None), weight)]
    return [((name, expert), matrix) for expert, matrix in enumerate(weight)]


def _routed(op: Op, values: Mapping[str, torch.Tensor], expert: int | None) -> torch.Tensor:
    """Return which tokens an expert gets, bool [T]."""
    return (values[op.inputs[1]].long() == expert).any(-1)
