"""Callers get these: deltas while an output grows, RequestOutput when it is whole. Names as a vLLM user knows them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ridgeline.core.step import TokenLogprob, Vectors
from ridgeline.decoding.request import Request
from ridgeline.engine.request import FinishReason, Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Tells how an output ended."""

    reason: FinishReason
    timings: Timings
    num_cached_tokens: int
    uncached_reason: str = ""  # why the prefix cache served no more of the prompt
    stop_reason: str | int | None = None  # the stop string or stop id that matched, None for an end-of-sequence id
    error: str | None = None
    seq_id: int = -1  # by which the journal knows the output; -1: it does not


class OutputDelta(msgspec.Struct, array_like=True):
    """One step added this to output `index` of a request; `text` is "" while part of a character is open."""

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = []  # each has its own
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    vector_H: Vectors | None = None
    finish: Finish | None = None
    came_s: float = 0.0  # when its reader's process got it, on a monotonic clock


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector that was made of a prompt, float32 [H]."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Vectors


@dataclass(slots=True)
class CompletionOutput:
    """One output, which may still grow. `logprobs` is None unless asked for; `finish_reason` is None until it ends."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    timings: Timings | None = None

    def extend(self, delta: OutputDelta) -> None:
        """Take in the next delta of this output."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(lp.logprob for lp in delta.logprobs)
        if delta.finish is not None:
            self.finish_reason = str(delta.finish.reason)
            self.stop_reason = delta.finish.stop_reason
            self.error = delta.finish.error
            self.timings = delta.finish.timings


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request over all its outputs; cached ones are prompt tokens served by the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """A request with all that it has so far. `prompt_logprobs` starts with None: nothing predicts the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    uncached_reason: str = ""

    @classmethod
    def begun(cls, request: Request, prompt: str | None = None) -> "RequestOutput":
        """Return the output of a request that has nothing yet."""
        outputs = [CompletionOutput(index) for index in range(request.params.n)]
        return cls(request.request_id, prompt, list(request.prompt_ids), outputs)

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def usage(self) -> Usage:
        generated = sum(len(output.token_ids) for output in self.outputs)
        return Usage(len(self.prompt_token_ids), generated, self.num_cached_tokens)

    def extend(self, delta: OutputDelta) -> None:
        """Take in the next delta of any output."""
        if delta.prompt_logprobs:
            self.prompt_logprobs = [*(self.prompt_logprobs or (None,)), *delta.prompt_logprobs]
        if delta.finish is not None and delta.index == 0:
            self.num_cached_tokens = delta.finish.num_cached_tokens
            self.uncached_reason = delta.finish.uncached_reason
        self.outputs[delta.index].extend(delta)
