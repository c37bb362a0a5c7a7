"""Recurrent ops over spans: a sequence in pieces is the sequence whole, whatever else is in the step."""

from random import Random

import op_cases_recurrent
import pytest
import torch

from ridgeline.backends.reference.dense import DenseMemory
from ridgeline.backends.reference.interpreter import REFERENCE_OPS

KINDS = sorted(op_cases_recurrent.CASES.keys() - {"gated_norm"})  # which keeps nothing


class StateMemory:
    """StepMemory of spans whose states live on from step to step; `members` are the sequences of the step."""

    def __init__(self, num_sequences: int, shape: tuple[int, ...]) -> None:
        self.states = torch.zeros(num_sequences, *shape)
        self.members: list[int] = []
        self.lengths: list[int] = []

    def spans(self):
        ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
        return [slice(end - length, end) for end, length in zip(ends, self.lengths)]

    def load(self, state, part):
        assert (state, part) == (0, 0)
        return self.states[self.members]

    def store(self, state, part, value_S):
        assert (state, part) == (0, 0)
        self.states[self.members] = value_S

    def log(self, state, part):
        return None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_sequences_are_the_sequences_whole(kind, seed):
    rng, generator = Random(f"{kind} {seed}"), torch.Generator().manual_seed(seed)
    case = op_cases_recurrent.CASES[kind](rng)
    weights = [torch.randn(shape, generator=generator) for shape in case.weights]
    lengths = [rng.randint(1, 9) for _ in range(3)]
    sequences = [[torch.randn(n, *shape[1:], generator=generator) for shape in case.inputs] for n in lengths]
    whole = [
        REFERENCE_OPS[kind](case.attrs, inputs, weights, DenseMemory(case.states, 1, n))[0]
        for inputs, n in zip(sequences, lengths)
    ]
    memory, done = StateMemory(3, case.states[0].parts[0]), [0, 0, 0]
    pieces = [[] for _ in sequences]
    while any(at < n for at, n in zip(done, lengths)):
        memory.members = [i for i in rng.sample(range(3), 3) if done[i] < lengths[i] and rng.random() < 0.8]
        memory.lengths = [min(rng.choice([1, 2, 2, 4]), lengths[i] - done[i]) for i in memory.members]
        if not memory.members:
            continue
        starts = [slice(done[i], done[i] + n) for i, n in zip(memory.members, memory.lengths)]
        inputs = [
            torch.cat([sequences[i][x][rows] for i, rows in zip(memory.members, starts)])
            for x in range(len(case.inputs))
        ]
        (out,) = REFERENCE_OPS[kind](case.attrs, inputs, weights, memory)
        for i, piece in zip(memory.members, out.split(memory.lengths)):
            pieces[i].append(piece)
            done[i] += len(piece)
    for expected, parts in zip(whole, pieces):
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)
