"""Run a program over whole sequences, without a cache: for training, distillation and the oracle of the tests.

Every token of a [B, T] batch gets logits, and gradients flow to the weights.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.backends.reference.attention import mask_of, visible_keys_SQL
from ridgeline.backends.reference.interpreter import interpret
from ridgeline.backends.reference.memory import CachedSpans
from ridgeline.program.op import ADAPTERS, LOGIT_ROWS, POSITIONS, TOKEN_IDS, Program, RecurrentState, State


class DenseMemory:
    """StepMemory of `batch` equally long sequences that start at position 0; their states live for one run.

    `visible_TT`: which keys each token sees, where that is not what causal attention sees.
    """

    def __init__(self, states: Sequence[State], batch: int, num_tokens: int, visible_TT: Tensor | None = None) -> None:
        self._states, self._batch, self._num_tokens, self._visible_TT = states, batch, num_tokens, visible_TT
        self._entries: dict[int, tuple[Tensor, ...]] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def write(self, state: int, *entries_TKD: Tensor) -> None:
        self._entries[state] = tuple(x.unflatten(0, (self._batch, -1)).transpose(1, 2) for x in entries_TKD)

    def cached(self, state: int, dtype: torch.dtype, window: int | None = None) -> Iterable[CachedSpans]:
        positions = torch.arange(self._num_tokens)[None]
        if (window, dtype) not in self._masks:
            if self._visible_TT is None:
                length, run = torch.tensor([self._num_tokens]), torch.tensor([1])
                visible_STT = visible_keys_SQL(positions, positions, length, run, window)
            else:
                assert window is None, "only full attention can be told what it sees"
                visible_STT = self._visible_TT[None]
            self._masks[window, dtype] = mask_of(visible_STT, dtype).expand(self._batch, -1, -1)
        rows = torch.arange(self._batch * self._num_tokens).unflatten(0, (self._batch, -1))
        entries = tuple(x.to(dtype) for x in self._entries[state])
        is_causal = self._visible_TT is None and (window is None or window >= self._num_tokens)
        return [CachedSpans(rows, entries, positions, positions, self._masks[window, dtype], is_causal)]

    def spans(self) -> Sequence[slice]:
        return [slice(i * self._num_tokens, (i + 1) * self._num_tokens) for i in range(self._batch)]

    def load(self, state: int, part: int) -> Tensor:
        sizes = self._states[state]
        assert isinstance(sizes, RecurrentState)
        return torch.zeros(self._batch, *sizes.parts[part])

    def store(self, state: int, part: int, value_S: Tensor) -> None:
        """Discard the state: the sequences end with the run."""

    def log(self, state: int, part: int) -> None:
        """Return None: nothing is taken back."""


class DenseModel(torch.nn.Module):
    """The program as a torch module whose parameters are the program's weights."""

    def __init__(self, program: Program, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.program = program
        self._parameter_names = {name: name.replace(".", "/") for name in program.weights}  # torch forbids dots
        for name, attribute in self._parameter_names.items():
            self.register_parameter(attribute, torch.nn.Parameter(weights[name]))

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights under the program's names."""
        return {name: self.get_parameter(attribute) for name, attribute in self._parameter_names.items()}

    def forward(
        self, token_ids_BT: Tensor, positions_T: Tensor | None = None, visible_TT: Tensor | None = None
    ) -> Tensor:
        """Compute `dense_logits`."""
        return dense_logits(self.program, self.named_weights(), token_ids_BT, positions_T, visible_TT)


def dense_logits(
    program: Program,
    weights: Mapping[str, Tensor],
    token_ids_BT: Tensor,
    positions_T: Tensor | None = None,
    visible_TT: Tensor | None = None,
) -> Tensor:
    """Compute the logits of every token of whole sequences, float32 [B, T, V]; `token_ids_BT` is int64.

    Tokens are at positions 0, 1, ... and see those before them, unless `positions_T` and `visible_TT` (bool, [query,
    key]) say otherwise.
    """
    batch, num_tokens = token_ids_BT.shape
    memory = DenseMemory(program.states, batch, num_tokens, visible_TT)
    values = interpret(program, weights, dense_inputs(token_ids_BT, positions_T), memory)
    return values[program.result].unflatten(0, (batch, num_tokens))


def dense_values(program: Program, weights: Mapping[str, Tensor], token_ids_BT: Tensor) -> dict[str, Tensor]:
    """Compute the result of the program and its taps, of all tokens [BT, ..]."""
    memory = DenseMemory(program.states, len(token_ids_BT), token_ids_BT.shape[1])
    return interpret(program, weights, dense_inputs(token_ids_BT), memory)


def dense_inputs(token_ids_BT: Tensor, positions_T: Tensor | None = None) -> dict[str, Tensor]:
    """Return the inputs of a step that computes whole sequences, at positions 0, 1, ... unless others are given."""
    batch, num_tokens = token_ids_BT.shape
    return {
        TOKEN_IDS: token_ids_BT.flatten(),
        POSITIONS: (torch.arange(num_tokens) if positions_T is None else positions_T).repeat(batch),
        LOGIT_ROWS: torch.arange(batch * num_tokens),
        ADAPTERS: torch.zeros(batch * num_tokens, dtype=torch.int64),
    }
