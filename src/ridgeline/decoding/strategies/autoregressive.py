"""One token at a time: compute what is known but not computed, sample one token at its end."""

from collections.abc import Mapping, Sequence

from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.step import DraftStats, Rounds, SampledToken, SampleRow, Span, StepPlan, StepResult, Vectors
from ridgeline.decoding.strategy import Accepted, Room, SequenceView, sample_row
from ridgeline.spec.spec import DecoderSpec


def build(spec: DecoderSpec, config: EngineConfig, clock: Clock) -> "Autoregressive":
    return Autoregressive()


class Autoregressive:
    """Strategy of models that continue text."""

    rolls_back = False
    one_token = True

    def ahead(self, running: Sequence[SequenceView]) -> bool:
        return True

    def begin(self, running: Sequence[SequenceView], room: Room) -> None:
        """Do nothing: each sequence takes one token."""

    def next_span(self, view: SequenceView, max_tokens: int, *, score_all: bool) -> Span | None:
        start, known = view.num_computed, view.token_ids
        end = min(start + max_tokens, len(known))
        num_rows = end - start if score_all else int(end == len(known))
        return Span(view.seq_id, start, known[start:end], num_rows, adapter=view.request.adapter)

    def rows(self, view: SequenceView, span: Span, first_row: int) -> Sequence[SampleRow]:
        if span.end < len(view.token_ids):
            return ()
        return (sample_row(view, first_row + span.num_logit_rows - 1),)

    def rounds(self, spans: Sequence[Span]) -> Rounds | None:
        """Return None: no step goes on by itself."""

    def accept(self, view: SequenceView, span: Span, sampled: Sequence[SampledToken]) -> Accepted:
        return Accepted(sampled, span.num_tokens)

    def pool(self, view: SequenceView, span: Span, rows_RH: Vectors) -> Vectors | None:
        """Return None: no span is pooled."""

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Do nothing: there is nothing to learn."""

    def drafts(self) -> Mapping[str, DraftStats] | None:
        """Return None: nothing is drafted."""

    def draft_gain(self) -> float | None:
        """Return None, as `drafts`."""

    def salt(self, view: SequenceView) -> str:
        return ""

    def forget(self, view: SequenceView) -> None:
        """Do nothing: there is no state."""
