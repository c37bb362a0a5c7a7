"""The Strategy seam: which tokens a sequence computes next, and which tokens the outcome adds.

Autoregressive decoding is one strategy; speculation and diffusion are others. The scheduler calls `next_span` while
planning and `accept` while committing, and knows nothing else about how tokens come to be.
"""

from collections.abc import Sequence
from typing import Protocol

from ridgeline.core.step import SampledToken, Span


class Strategy(Protocol):
    """How one kind of decoding moves a sequence forward."""

    def next_span(
        self, seq_id: int, token_ids: Sequence[int], num_computed: int, max_tokens: int, *, score_all: bool
    ) -> Span:
        """The next tokens to compute, at most `max_tokens`; `score_all` asks for logits of every one of them."""
        ...

    def accept(self, span: Span, sampled: SampledToken) -> Sequence[int]:
        """The tokens that the sequence gains from a span that reached its last known token."""
        ...


class Autoregressive:
    """One token at a time: compute what is known but not computed, sample one token at its end."""

    def next_span(
        self, seq_id: int, token_ids: Sequence[int], num_computed: int, max_tokens: int, *, score_all: bool
    ) -> Span:
        end = min(num_computed + max_tokens, len(token_ids))
        reaches_end = end == len(token_ids)
        num_rows = end - num_computed if score_all else int(reaches_end)
        return Span(seq_id, num_computed, token_ids[num_computed:end], num_rows)

    def accept(self, span: Span, sampled: SampledToken) -> Sequence[int]:
        return (sampled.token_id,)
