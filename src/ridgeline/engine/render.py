"""Events -> deltas with text: incremental detokenization and stop strings. Runs in the loop's thread, after commit.

A stop string ends an output at its token: what the same step put behind it is dropped. An error ends its output alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ridgeline.core.log import get_logger
from ridgeline.core.step import TokenLogprob
from ridgeline.decoding.request import Request
from ridgeline.engine.outputs import Finish, OutputDelta
from ridgeline.engine.request import (
    DecodeEvent,
    Event,
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    TokenEvent,
    TokensEvent,
    VectorEvent,
)
from ridgeline.text.detokenizer import IncrementalDetokenizer
from ridgeline.text.tokenizer import Tokenizer

OutputKey = tuple[str, int]

log = get_logger("engine")


@dataclass(slots=True)
class Rendered:
    """One delta per output that changed; `stopped` by a stop string and `failed` (why) must end in the scheduler.

    `finished`: the ends among the events, with the number of tokens that callers get.
    """

    deltas: dict[OutputKey, OutputDelta] = field(default_factory=dict)
    stopped: dict[OutputKey, None] = field(default_factory=dict)
    failed: dict[OutputKey, str] = field(default_factory=dict)
    finished: list[FinishEvent] = field(default_factory=list)


class Renderer:
    """Runs one detokenizer per unfinished output. Without a tokenizer, deltas carry token ids only."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._open: dict[OutputKey, IncrementalDetokenizer] = {}

    def render(self, events: Iterable[Event]) -> Rendered:
        rendered = Rendered()
        for event in events:
            match event:
                case DecodeEvent():
                    for seq, token in zip(event.seqs, event.tokens):
                        self._token(rendered, seq.request, seq.index, token.token_id, token.logprob, ends=False)
                case TokensEvent():
                    self._tokens(rendered, event)
                case TokenEvent():
                    self._token(rendered, event.request, event.index, event.token_id, event.logprob, ends=event.ends)
                case _:
                    self._rest(rendered, event)
        return rendered

    def _rest(self, rendered: Rendered, event: PromptLogprobsEvent | VectorEvent | FinishEvent) -> None:
        """Take in what is no token."""
        key = event.request.request_id, event.index
        if (delta := rendered.deltas.get(key)) is None:
            delta = rendered.deltas[key] = OutputDelta(*key)
        match event:
            case PromptLogprobsEvent():
                delta.prompt_logprobs = [*delta.prompt_logprobs, *event.logprobs]
            case VectorEvent():
                delta.vector_H = event.vector_H
            case FinishEvent():
                rendered.finished.append(self._finish(event, key, delta, rendered.failed.pop(key, None)))
                rendered.stopped.pop(key, None)

    def _fault(self, key: OutputKey, error: Exception) -> str:
        log.error("output %d of %s could not be rendered", key[1], key[0], exc_info=error)
        self._open.pop(key, None)
        return f"this output could not be rendered: {type(error).__name__}"

    def _tokens(self, rendered: Rendered, event: TokensEvent) -> None:
        """Add several tokens, at once where no stop string is looked for."""
        request, key = event.request, (event.request.request_id, event.index)
        detokenizer = self._open.get(key)
        if detokenizer is None or request.params.stop or key in rendered.failed:
            for token_id in event.token_ids:
                self._token(rendered, request, event.index, token_id, None, ends=False)
            return
        if (delta := rendered.deltas.get(key)) is None:
            delta = rendered.deltas[key] = OutputDelta(*key)
        delta.token_ids += event.token_ids
        try:
            delta.text += detokenizer.feed(event.token_ids)
        except Exception as error:
            rendered.failed[key] = self._fault(key, error)

    def _token(
        self,
        rendered: Rendered,
        request: Request,
        index: int,
        token_id: int,
        logprob: TokenLogprob | None,
        *,
        ends: bool,
    ) -> None:
        """Add a token to its output's delta, unless a stop string or an error came before it."""
        key, deltas = (request.request_id, index), rendered.deltas
        if (rendered.stopped and key in rendered.stopped) or (rendered.failed and key in rendered.failed):
            return
        if (delta := deltas.get(key)) is None:
            delta = deltas[key] = OutputDelta(*key)
        delta.token_ids.append(token_id)
        if logprob is not None:
            delta.logprobs = [*delta.logprobs, logprob]
        if self._tokenizer is None or (ends and not request.params.include_stop_str_in_output):
            return
        try:
            if (detokenizer := self._open.get(key)) is None:
                detokenizer = self._open[key] = detokenizer_of(self._tokenizer, request)
            delta.text += detokenizer.push(token_id)
            if detokenizer.stop_found is not None:
                rendered.stopped[key] = None
        except Exception as error:
            rendered.failed[key] = self._fault(key, error)

    def _finish(self, event: FinishEvent, key: OutputKey, delta: OutputDelta, failure: str | None) -> FinishEvent:
        """Close an output; `failure` is what went wrong with it in this step. Return its end as callers see it."""
        detokenizer = self._open.pop(key, None)
        asked = event.request.params.stop_token_ids  # the model's own end-of-sequence ids are not worth telling
        reason, stop_reason = event.reason, event.stop_token_id if event.stop_token_id in asked else None
        if detokenizer is not None:
            if detokenizer.stop_found is not None:  # what its last step put behind the stop string is not delivered
                num_output = detokenizer.num_tokens
                event = replace(event, num_output=num_output, timings=event.timings.of_tokens(num_output))
            try:
                delta.text += detokenizer.flush()
            except Exception as error:
                failure = self._fault(key, error)
            if detokenizer.stop_found is not None:
                reason, stop_reason = FinishReason.STOP, detokenizer.stop_found
        if failure is not None:
            reason, stop_reason = FinishReason.ERROR, None
        delta.finish = Finish(
            reason=reason,
            timings=event.timings,
            num_cached_tokens=event.cached.num_tokens,
            uncached_reason=event.cached.reason,
            stop_reason=stop_reason,
            error=failure or event.error,
            seq_id=event.seq_id,
        )
        return event


def detokenizer_of(tokenizer: Tokenizer, request: Request) -> IncrementalDetokenizer:
    """Return what makes the text of one of the request's outputs."""
    params = request.params
    return IncrementalDetokenizer(
        tokenizer,
        request.prompt_ids,
        skip_special_tokens=params.skip_special_tokens,
        shown_ids=request.shown_ids,
        stop=params.stop_strings,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
