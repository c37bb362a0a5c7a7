"""What one engine step is: the plan that the scheduler makes, and the result that the executor gives back.

Legend of shape letters used across the project:
    T tokens in the step · S spans (one per scheduled sequence) · R rows that need logits · V vocabulary
    N query heads · K key/value heads · D head size · H hidden size · F feed-forward size · B blocks · L layers

Plain data, no torch: the same structs cross a thread, a process or a machine boundary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.core.params import SamplingParams

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence, computed in one step.

    A prompt chunk, one decode token, a draft to verify and a diffusion block are all spans: positions
    `start .. start + len(token_ids)`, of which the last `num_logit_rows` need logits. The span is cut into runs of
    `mutual` tokens, from its start on: a token sees all that is before its run, and its whole run. Runs of one token
    are causal attention. Of what it computes the first `num_kept` tokens are final (None: all); the others are
    computed again.
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    num_logit_rows: int
    mutual: int = 1
    num_kept: int | None = None
    adapter: int = 0  # number of the LoRA adapter that computes it, from 1; 0: none

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def kept_end(self) -> int:
        """One past the last position whose result stays."""
        return self.end if self.num_kept is None else self.start + self.num_kept

    @property
    def end(self) -> int:
        """One past the last position of the span: the sequence's KV length once the step has run."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where one cache group keeps one sequence: block `i` holds positions `first_token + i * block_size ..`.

    `first_token` is a multiple of the block size; it is above 0 only where a sliding window has freed the start.
    """

    first_token: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: before anything is written, block `source` of `group` is copied to `target`."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to decide, from logit row `row` (index into the R rows of the step), for sequence `seq_id`.

    `seed` and `num_output` fix the random number, so a token does not depend on the batch, the chunking or preemption.
    `output_ids` is filled only where `params.needs_history`.
    """

    seq_id: int
    row: int
    params: SamplingParams
    seed: int
    num_output: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    stop_ids: Sequence[int]  # end-of-sequence ids, suppressed while fewer than min_tokens are out; () is enough later


@dataclass(frozen=True, slots=True)
class PromptLogprobRow:
    """Logit row `row` scores the known prompt token `token_id`, `num_top` alternatives beside it."""

    seq_id: int
    row: int
    token_id: int
    num_top: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token in the raw model distribution, its rank (1: most likely), and the top ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything an executor needs for one step."""

    step: int
    spans: tuple[Span, ...]
    tables: tuple[tuple[BlockTable, ...], ...]  # [group][span]
    copies: tuple[BlockCopy, ...]
    samples: tuple[SampleRow, ...]
    prompt_rows: tuple[PromptLogprobRow, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The decision for one SampleRow. `error` is set, and the token meaningless, when its logits were not finite."""

    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, aligned with the plan's `samples` and `prompt_rows`."""

    step: int
    samples: tuple[SampledToken, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
