"""Rotate hidden states: one orthogonal matrix goes into all weights that write or read them, norms into readers.

What the model computes stays the same, while an outlier of one channel becomes a small part of all (arXiv 2404.00456).
The matrix is random signs, Hadamard matrices as wide as the largest power of two in a row, and a cosine transform
across them. Rotations that would have to be computed at every step are left out.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ridgeline.core.dtypes import Array, Float32s, float32
from ridgeline.core.errors import ConfigError
from ridgeline.program.op import TOKEN_IDS, Program
from ridgeline.program.ops.dense import MATRIX_OPS, NormAttrs
from ridgeline.quant.kv import rotate, rotation_width

SAME_BASIS = {"add": 2, "scale": 1, "select_rows": 1, "gate_rows": 1, "rmsnorm": 1}  # inputs rotated as the output is
ROWS = 1024  # rotated at a time: temporaries are small beside a table

Norm = tuple[tuple[str, ...], np.float32]  # weights, and what is added to each before it multiplies
Turn = tuple[bool, bool, Norm]  # whether a weight's inputs and its outputs are rotated, and the norm of those inputs
NO_NORM: Norm = (), np.float32(0)


class RotatedWeights(Mapping[str, Array]):
    """The weights of a program whose head is not tied, each made of the model's when it is asked for, in float32."""

    def __init__(self, model: str, program: Program, weights: Mapping[str, Array], seed: int) -> None:
        """Find what is rotated. Raises ConfigError, which names the model, where more than matrices read it."""
        self._program, self._weights = program, weights
        self._turns, self._norms = _turns(model, program)
        hidden = program.weights["embed.weight"][1]
        self._signs_H = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), hidden)
        self._width = rotation_width(hidden)
        count = np.arange(hidden // self._width)
        cosines_CC = np.cos(np.pi / len(count) * np.outer(count, count + 0.5)) * np.sqrt(2 / hidden)
        cosines_CC[0] /= np.sqrt(2)
        self._cosines_CC = cosines_CC.astype(np.float32)

    def __getitem__(self, name: str) -> Array:
        weight: Float32s = float32(self._weights[name if name in self._weights else "embed.weight"])
        if name in self._norms:
            return np.full_like(weight, 1 - self._norms[name])
        reads, writes, (scales, offset) = self._turns.get(name, (False, False, NO_NORM))
        for scale in scales:
            weight = float32(weight * (float32(self._weights[scale]) + offset))
        weight = self._turned(weight) if reads or (writes and name.endswith(".bias")) else weight
        if writes and not name.endswith(".bias"):
            weight = self._turned(weight.swapaxes(-1, -2)).swapaxes(-1, -2)
        return np.ascontiguousarray(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._program.weights)

    def __len__(self) -> int:
        return len(self._program.weights)

    def _turned(self, rows: Float32s) -> Float32s:
        """Multiply rows [..., H] by the orthogonal matrix."""
        rows_RH = rows.reshape(-1, rows.shape[-1])
        turned_RH = np.empty_like(rows_RH)
        for begin in range(0, len(rows_RH), ROWS):
            part = rows_RH[begin : begin + ROWS] * self._signs_H
            mixed_RCW = self._cosines_CC @ rotate(part.reshape(len(part), -1, self._width))
            turned_RH[begin : begin + ROWS] = mixed_RCW.reshape(part.shape)
        return turned_RH.reshape(rows.shape)


def _turns(model: str, program: Program) -> tuple[dict[str, Turn], dict[str, np.float32]]:
    """Return how every weight changes that does; and those of norms, which become one, with what is added to them."""
    rotated, refusal = _rotated_values(program), f"{model} cannot be rotated"
    turns, norms, made_by = dict[str, Turn](), dict[str, np.float32](), dict[str, Norm]()  # the last: values
    if program.result in rotated:
        raise ConfigError(f"{refusal}: hidden states are what it gives")
    for op in program.ops:
        reads, writes = (not rotated.isdisjoint(names) for names in (op.inputs, op.outputs))
        norm = next((made_by[name] for name in op.inputs if name in made_by), NO_NORM)
        found: dict[str, Turn] = {}
        if op.kind == "embed" and writes:
            found = dict.fromkeys(op.weights, (True, False, NO_NORM))
        elif op.kind in MATRIX_OPS:
            found = {op.weights[0]: (reads, writes, norm), **dict.fromkeys(op.weights[1:], (False, writes, NO_NORM))}
        elif op.kind == "experts":
            found = dict.fromkeys(op.weights[:2], (reads, False, norm))
            found |= dict.fromkeys((op.weights[2], *op.weights[5:]), (False, writes, NO_NORM))
        elif reads and (op.kind not in SAME_BASIS or (norm[0] and op.kind in ("add", "rmsnorm"))):
            raise ConfigError(f"{refusal}: {op.label} ({op.kind}) reads hidden states channel by channel")
        elif reads and isinstance(op.attrs, NormAttrs):
            made_by[op.outputs[0]] = op.weights, np.float32(op.attrs.unit_offset)
            norms |= dict.fromkeys(op.weights, np.float32(op.attrs.unit_offset))
        elif reads:
            made_by[op.outputs[0]] = norm
        for name, turn in found.items():
            if turns.setdefault(name, turn) != turn:
                raise ConfigError(f"{refusal}: {name} is used twice, with different norms before it")
    return turns, norms


def _rotated_values(program: Program) -> set[str]:
    """Return the values in the basis of the hidden states: what sums and norms tie to the embedding of tokens."""
    rotated = {name for op in program.ops if op.kind == "embed" and op.inputs == (TOKEN_IDS,) for name in op.outputs}
    for op in (*program.ops, *reversed(program.ops), *program.ops):  # sums, what is added, and what reads it too
        tied = {*op.inputs[: SAME_BASIS[op.kind]], *op.outputs} if op.kind in SAME_BASIS else set[str]()
        rotated |= tied if rotated & tied else set[str]()
    return rotated
