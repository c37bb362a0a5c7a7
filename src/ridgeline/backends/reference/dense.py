"""Run a program over whole sequences, without a cache: for training, distillation and the oracle of the tests.

Every token of a [B, T] batch gets logits, and gradients flow to the weights.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F

from ridgeline.backends.reference.attention import alibi_SNQL, grouped_attention, mask_of, visible_keys_SQL
from ridgeline.backends.reference.interpreter import interpret
from ridgeline.backends.reference.memory import LatentSpans
from ridgeline.program.op import ADAPTERS, LOGIT_ROWS, POSITIONS, TOKEN_IDS, Program, RecurrentState, State
from ridgeline.program.ops.attention import AttentionAttrs


class DenseMemory:
    """StepMemory of `batch` equally long sequences that start at position 0; their states live for one run.

    `visible_TT`: which keys each token sees, where that is not what causal attention sees.
    """

    def __init__(
        self, states: Sequence[State], batch: int, num_tokens: int, visible_TT: torch.Tensor | None = None
    ) -> None:
        self._states = states
        self._batch = batch
        self._num_tokens = num_tokens
        self._visible_TT = visible_TT
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._latents: dict[int, torch.Tensor] = {}

    def write(self, state: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        self._kv[state] = (k_TKD.unflatten(0, (self._batch, -1)), v_TKD.unflatten(0, (self._batch, -1)))

    def attend(
        self,
        attrs: AttentionAttrs,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        q = q_TND.unflatten(0, (self._batch, -1))
        k, v = self._kv[attrs.state]
        is_causal = self._visible_TT is None and (attrs.window is None or attrs.window >= self._num_tokens)
        if is_causal and attrs.softcap is None and attrs.alibi_slopes is None and sinks_N is None:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                scale=attrs.scale,
                enable_gqa=q.shape[2] != k.shape[2],
            )
            return out.transpose(1, 2).flatten(0, 1)
        positions = torch.arange(self._num_tokens)[None]
        mask = self._mask(attrs.window, q.dtype)
        bias = alibi_SNQL(attrs.alibi_slopes, positions, positions)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        out = grouped_attention(q, k, v, mask, attrs.scale, attrs.softcap, bias, sinks_N)
        return out.flatten(0, 1)

    def write_latent(self, state: int, entries_TE: torch.Tensor) -> None:
        self._latents[state] = entries_TE.unflatten(0, (self._batch, -1))

    def latents(self, state: int, dtype: torch.dtype) -> Iterable[LatentSpans]:
        rows = torch.arange(self._batch * self._num_tokens).unflatten(0, (self._batch, -1))
        return [LatentSpans(rows, self._latents[state].to(dtype), self._mask(None, dtype))]

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        return mask_of(self._visible(window), dtype).expand(self._batch, -1, -1)

    def _visible(self, window: int | None) -> torch.Tensor:
        """Return which keys each query sees, bool [1, T, T]."""
        positions = torch.arange(self._num_tokens)[None]
        if self._visible_TT is None:
            length, run = torch.tensor([self._num_tokens]), torch.tensor([1])
            return visible_keys_SQL(positions, positions, length, run, window)
        assert window is None, "only full attention can be told what it sees"
        return self._visible_TT[None]

    def spans(self) -> Sequence[slice]:
        return [slice(i * self._num_tokens, (i + 1) * self._num_tokens) for i in range(self._batch)]

    def load(self, state: int, part: int) -> torch.Tensor:
        sizes = self._states[state]
        assert isinstance(sizes, RecurrentState)
        return torch.zeros(self._batch, *sizes.parts[part])

    def store(self, state: int, part: int, value_S: torch.Tensor) -> None:
        """Discard the state: the sequences end with the run."""


class DenseModel(torch.nn.Module):
    """The program as a torch module whose parameters are the program's weights."""

    def __init__(self, program: Program, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._program = program
        self._parameter_names = {name: name.replace(".", "/") for name in program.weights}  # torch forbids dots
        for name, attribute in self._parameter_names.items():
            self.register_parameter(attribute, torch.nn.Parameter(weights[name]))

    @property
    def program(self) -> Program:
        return self._program

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights under the program's names."""
        return {name: self.get_parameter(attribute) for name, attribute in self._parameter_names.items()}

    def forward(
        self,
        token_ids_BT: torch.Tensor,
        positions_T: torch.Tensor | None = None,
        visible_TT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `dense_logits`."""
        return dense_logits(self._program, self.named_weights(), token_ids_BT, positions_T, visible_TT)


def dense_logits(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    token_ids_BT: torch.Tensor,
    positions_T: torch.Tensor | None = None,
    visible_TT: torch.Tensor | None = None,
    adapter: int = 0,
) -> torch.Tensor:
    """Compute the logits of every token of whole sequences, float32 [B, T, V]; `token_ids_BT` is int64.

    Tokens are at positions 0, 1, ... and see those before them, unless `positions_T` and `visible_TT` (bool, [query,
    key]) say otherwise. `adapter`: the number of the LoRA adapter of all tokens, 0 for none.
    """
    batch, num_tokens = token_ids_BT.shape
    positions = torch.arange(num_tokens) if positions_T is None else positions_T
    inputs = {
        TOKEN_IDS: token_ids_BT.flatten(),
        POSITIONS: positions.repeat(batch),
        LOGIT_ROWS: torch.arange(batch * num_tokens),
        ADAPTERS: torch.full((batch * num_tokens,), adapter),
    }
    values = interpret(program, weights, inputs, DenseMemory(program.states, batch, num_tokens, visible_TT))
    return values[program.result].unflatten(0, (batch, num_tokens))
