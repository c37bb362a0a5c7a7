"""Events -> deltas with text: incremental detokenization and stop strings. Runs in the loop's thread, after commit."""

from collections.abc import Iterable

from ridgeline.engine.outputs import Finish, OutputDelta
from ridgeline.engine.request import Event, FinishEvent, FinishReason, PromptLogprobsEvent, TokenEvent
from ridgeline.text.detokenizer import IncrementalDetokenizer
from ridgeline.text.tokenizer import Tokenizer

AnswerKey = tuple[str, int]


class Renderer:
    """One detokenizer per unfinished answer. Without a tokenizer, deltas carry token ids only."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._open: dict[AnswerKey, IncrementalDetokenizer] = {}

    def render(self, events: Iterable[Event]) -> tuple[list[OutputDelta], list[AnswerKey]]:
        """One delta per answer that changed, and the answers that a stop string ended: the scheduler must end those."""
        deltas: dict[AnswerKey, OutputDelta] = {}
        stopped: dict[AnswerKey, None] = {}
        for event in events:
            key = (event.request.request_id, 0 if isinstance(event, PromptLogprobsEvent) else event.index)
            delta = deltas.setdefault(key, OutputDelta(*key))
            match event:
                case PromptLogprobsEvent():
                    delta.prompt_logprobs.extend(event.logprobs)
                case TokenEvent():
                    if self._token(event, key, delta):
                        stopped[key] = None
                case FinishEvent():
                    self._finish(event, key, delta)
                    stopped.pop(key, None)
        return list(deltas.values()), list(stopped)

    def _token(self, event: TokenEvent, key: AnswerKey, delta: OutputDelta) -> bool:
        """Adds a token to a delta; True if it completed a stop string."""
        delta.token_ids.append(event.token_id)
        if event.logprob is not None:
            delta.logprobs.append(event.logprob)
        params = event.request.params
        if self._tokenizer is None or (event.ends and not params.include_stop_str_in_output):
            return False
        if key not in self._open:
            self._open[key] = IncrementalDetokenizer(
                self._tokenizer,
                event.request.prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        delta.text += self._open[key].feed((event.token_id,))
        return self._open[key].stop_found is not None

    def _finish(self, event: FinishEvent, key: AnswerKey, delta: OutputDelta) -> None:
        detokenizer = self._open.pop(key, None)
        reason, stop_reason = event.reason, self._stop_id(event)
        if detokenizer is not None:
            delta.text += detokenizer.flush()
            if detokenizer.stop_found is not None:
                reason, stop_reason = FinishReason.STOP, detokenizer.stop_found
        delta.finish = Finish(
            reason=reason,
            timings=event.timings,
            num_cached_tokens=event.cached.num_tokens,
            uncached_reason=event.cached.reason,
            stop_reason=stop_reason,
            error=event.error,
        )

    @staticmethod
    def _stop_id(event: FinishEvent) -> int | None:
        """The stop id that the caller asked for; the model's own end-of-sequence ids are not worth telling."""
        return event.stop_token_id if event.stop_token_id in event.request.params.stop_token_ids else None
