"""Calibration: windows of text, and what flows through a program when it is computed on them, op by op.

A program is data, so every family is calibrated by the same code: what an op reads is looked up by name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from ridgeline.backends.reference.dense import DenseMemory, dense_inputs
from ridgeline.backends.reference.interpreter import compute
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.compress.methods import Statistics
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.op import Op, Program
from ridgeline.program.passes.liveness import liveness
from ridgeline.quality.corpus import split, standard_library
from ridgeline.quality.texts import Texts
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

BATCH = 8  # windows that run together
LAYER = re.compile(r"layers\.(\d+)\.")

Values = dict[str, torch.Tensor]


def default_texts() -> Texts:
    """Return the training split of the standard library, of which nothing is in the held-out texts."""
    train, _ = split(standard_library())
    return Texts("training modules of the standard library", {file.path: file.text for file in train})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that continues text, with its weights in float32."""

    folder: ModelFolder
    spec: DecoderSpec
    program: Program
    weights: dict[str, torch.Tensor]

    @classmethod
    def open(cls, name: str | Path) -> "Loaded":
        """Load it. Raises ConfigError for one that predicts no next token, and as a folder does."""
        folder = ModelFolder.open(name)
        spec = read_spec(folder.config)
        if spec.head is None or spec.diffusion is not None:
            raise ConfigError(f"{folder.name} predicts no next token: it is an encoder, or fills in masks")
        program = lower(spec)
        weights = as_tensors(load_weights(folder, spec, program, FLOAT32))
        device = torch.get_default_device()
        return cls(folder, spec, program, {name: weight.to(device) for name, weight in weights.items()})


def windows(texts: Texts, tokenizer: Tokenizer, count: int, length: int, seed: int) -> list[torch.Tensor]:
    """Return at most `count` whole windows of `length` tokens, drawn from the texts, in batches [B, T].

    A window is of one text. Raises ConfigError where no text is that long.
    """
    rng = np.random.default_rng(seed)
    names = list(texts.by_name)
    found: list[list[int]] = []
    per_text = max(1, -(-2 * count // len(names)))
    for index in rng.permutation(len(names)).tolist():
        ids = tokenizer.encode(texts.by_name[names[index]])
        starts = rng.permutation(len(ids) // length)[:per_text] * length
        found += [ids[start : start + length] for start in starts.tolist()]
        if len(found) >= count:
            break
    if not found:
        raise ConfigError(f"no calibration text has {length} tokens; give longer ones, or a smaller --length")
    return list(torch.tensor(found[:count]).split(BATCH))


def layers_of(program: Program) -> list[range]:
    """Return the ops of every layer, by their numbers, each layer's up to the next one's.

    What comes before the first layer belongs to it, what comes after the last to none.
    """
    numbers = [LAYER.match(op.label) for op in program.ops]
    firsts: dict[int, int] = {}
    last = 0
    for index, match in enumerate(numbers):
        if match:
            firsts.setdefault(int(match[1]), index)
            last = index + 1
    bounds = [0, *list(firsts.values())[1:], last]
    return [range(begin, end) for begin, end in zip(bounds, bounds[1:])]


def shares_states(program: Program) -> bool:
    """Tell whether a layer reads keys and values of another one."""
    users: dict[int, set[str]] = {}
    for op in program.ops:
        state: int | None = getattr(op.attrs, "state", None)
        match = LAYER.match(op.label)
        if state is not None and match:
            users.setdefault(state, set()).add(match[1])
    return any(len(layers) > 1 for layers in users.values())


class Flow:
    """Holds the values of calibration windows that ops to come still read, for as far as the program has been run."""

    def __init__(self, program: Program, batches: Sequence[torch.Tensor]) -> None:
        self._program, self._batches = program, batches
        self._last_reader = liveness([(op,) for op in program.ops], program.result).last_reader
        self._shares_states = shares_states(program)
        self._memories = self._new_memories()
        self.values: list[Values] = [dense_inputs(ids_BT) for ids_BT in batches]

    def begin_layer(self) -> list[Values]:
        """Forget the keys and values of layers before, where no later one reads them; return a copy of the values."""
        if not self._shares_states:
            self._memories = self._new_memories()
        return [dict(values) for values in self.values]

    def run(self, numbers: Iterable[int], weights: Mapping[str, torch.Tensor]) -> None:
        """Compute ops on all windows, and drop what no later one reads."""
        for number, (values, memory) in product(numbers, zip(self.values, self._memories, strict=True)):
            op = self._program.ops[number]
            compute(op, weights, values, memory)
            for name in (*op.inputs, *op.outputs):
                if self._last_reader.get(name, -1) <= number:
                    values.pop(name, None)

    def rows(self, name: str) -> list[torch.Tensor]:
        """Return a value's rows, [T, K] of each batch."""
        return [values[name].flatten(0, -2) for values in self.values]

    def _new_memories(self) -> list[DenseMemory]:
        return [DenseMemory(self._program.states, len(ids_BT), ids_BT.shape[1]) for ids_BT in self._batches]


def statistics_of(rows: Sequence[torch.Tensor]) -> Statistics | None:
    """Return what rows of inputs say; None where there are none."""
    num_rows = sum(map(len, rows))
    if num_rows == 0:
        return None
    hessian_KK = torch.zeros(rows[0].shape[1], rows[0].shape[1])
    total_K, largest_K = torch.zeros(rows[0].shape[1]), torch.zeros(rows[0].shape[1])
    for x_TK in rows:
        hessian_KK.addmm_(x_TK.T, x_TK)
        total_K += x_TK.abs().sum(0)
        if len(x_TK):
            largest_K = torch.maximum(largest_K, x_TK.abs().amax(0))
    return Statistics(hessian_KK.div_(num_rows), total_K / num_rows, largest_K, num_rows)


def readers(program: Program, name: str) -> list[Op]:
    """Return the ops that read a value."""
    return [op for op in program.ops if name in op.inputs]
