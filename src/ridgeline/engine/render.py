"""Events -> deltas with text: incremental detokenization and stop strings. Runs in the loop's thread, after commit.

A stop string ends an output at its token: what the same step put behind it is dropped. An error ends its output alone.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ridgeline.core.log import get_logger
from ridgeline.engine.outputs import Finish, OutputDelta
from ridgeline.engine.request import Event, FinishEvent, FinishReason, PromptLogprobsEvent, TokenEvent, VectorEvent
from ridgeline.text.detokenizer import IncrementalDetokenizer
from ridgeline.text.tokenizer import Tokenizer

OutputKey = tuple[str, int]

log = get_logger("engine")


class Rendered(NamedTuple):
    """One delta per output that changed; `stopped` by a stop string and `failed` (why) must end in the scheduler.

    `finished`: the ends among the events, with the number of tokens that callers get.
    """

    deltas: list[OutputDelta]
    stopped: list[OutputKey]
    failed: dict[OutputKey, str]
    finished: list[FinishEvent]


class Renderer:
    """Runs one detokenizer per unfinished output. Without a tokenizer, deltas carry token ids only."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._open: dict[OutputKey, IncrementalDetokenizer] = {}

    def render(self, events: Iterable[Event]) -> Rendered:
        deltas: dict[OutputKey, OutputDelta] = {}
        stopped: dict[OutputKey, None] = {}
        failed: dict[OutputKey, str] = {}
        finished: list[FinishEvent] = []
        for event in events:
            key = event.request.request_id, event.index
            delta = deltas.get(key)
            if delta is None:
                delta = deltas[key] = OutputDelta(*key)
            match event:
                case TokenEvent():
                    if (stopped or failed) and (key in stopped or key in failed):
                        continue
                    try:
                        if self._token(event, key, delta):
                            stopped[key] = None
                    except Exception as error:
                        failed[key] = self._fault(key, error)
                case PromptLogprobsEvent():
                    delta.prompt_logprobs = [*delta.prompt_logprobs, *event.logprobs]
                case VectorEvent():
                    delta.vector_H = event.vector_H
                case FinishEvent():
                    finished.append(self._finish(event, key, delta, failed.pop(key, None)))
                    stopped.pop(key, None)
        return Rendered(list(deltas.values()), list(stopped), failed, finished)

    def _fault(self, key: OutputKey, error: Exception) -> str:
        log.error("output %d of %s could not be rendered", key[1], key[0], exc_info=error)
        self._open.pop(key, None)
        return f"this output could not be rendered: {type(error).__name__}"

    def _token(self, event: TokenEvent, key: OutputKey, delta: OutputDelta) -> bool:
        """Add a token to a delta; return True if it completed a stop string."""
        delta.token_ids.append(event.token_id)
        if event.logprob is not None:
            delta.logprobs = [*delta.logprobs, event.logprob]
        params = event.request.params
        if self._tokenizer is None or (event.ends and not params.include_stop_str_in_output):
            return False
        detokenizer = self._open.get(key)
        if detokenizer is None:
            detokenizer = self._open[key] = IncrementalDetokenizer(
                self._tokenizer,
                event.request.prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                shown_ids=event.request.shown_ids,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        delta.text += detokenizer.push(event.token_id)
        return detokenizer.stop_found is not None

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
        )
        return event
