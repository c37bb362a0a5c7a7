"""Beam search: the outputs of the highest probability, found above the engine as vLLM finds them.

Each round asks for one more token of every beam, with twice as many alternatives as there are beams. Beams are requests
of one token: what they have in common is in the prefix cache, whose blocks they share.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ridgeline.core.errors import RequestError
from ridgeline.core.params import MAX_LOGPROBS, SamplingParams
from ridgeline.core.step import TokenLogprob
from ridgeline.decoding.request import Request
from ridgeline.engine.outputs import CompletionOutput, Finish, RequestOutput
from ridgeline.engine.render import detokenizer_of
from ridgeline.engine.request import Timings
from ridgeline.server.openai.protocol import SamplingFields

if TYPE_CHECKING:
    from ridgeline.server.openai.reply import Reply

MAX_BEAMS = MAX_LOGPROBS // 2


@dataclass(frozen=True, slots=True)
class _Beam:
    """Tokens so far, and the sum of their log-probabilities; `ends` behind an end-of-sequence or stop id."""

    logprobs: tuple[TokenLogprob, ...] = ()
    total: float = 0.0
    ends: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [each.token_id for each in self.logprobs]

    def score(self, length_penalty: float, length: int | None = None) -> float:
        """Return the sum over the length, or over `length`, to the power of the penalty."""
        return self.total / max(1, len(self.logprobs) if length is None else length) ** length_penalty


def beam_penalty(fields: SamplingFields, params: SamplingParams) -> float | None:
    """Return the length penalty where beams are asked for. Raises RequestError beside what beams do not have."""
    if not fields.use_beam_search:
        if fields.length_penalty is not None:
            raise RequestError("length_penalty needs use_beam_search=true", param="length_penalty")
        return None
    plain = SamplingParams()
    others = ("stop_strings", "structured_outputs", "logit_bias", "presence_penalty", "frequency_penalty")
    others = (*others, "repetition_penalty", "prompt_logprobs")
    unlike = [name for name in others if getattr(params, name) != getattr(plain, name)]
    for what in ["stream"] * bool(fields.stream) + unlike[:1]:
        raise RequestError(f"use_beam_search goes without {what}: leave one of them out", param="use_beam_search")
    if params.n > MAX_BEAMS:
        raise RequestError(f"n={params.n} beams; at most {MAX_BEAMS} are searched", param="n")
    return 1.0 if fields.length_penalty is None else fields.length_penalty


async def search(reply: "Reply", request: Request, length_penalty: float) -> RequestOutput:
    """Return the `n` best outputs of an admitted request, whose deadline is that of all rounds.

    Raises as `Reply.deltas` does.
    """
    width, lasts = request.params.n, request.max_tokens
    live, done = [_Beam()], list[_Beam]()
    first = last = None
    for length in range(1, lasts + 1):
        found, last = await _continued(reply, f"{request.request_id}-{length}", request, live, 2 * width)
        first = first or last
        found.sort(key=lambda beam: -beam.total)
        is_early = length < request.params.min_tokens
        done += [beam for beam in found[: 2 * width] if beam.ends and not is_early]
        done = sorted(done, key=lambda beam: -beam.score(length_penalty))[:width]
        live = [beam for beam in found if not beam.ends][:width]
        longest = lasts if length_penalty > 0 else length
        if not live or (
            len(done) == width and live[0].score(length_penalty, longest) <= done[-1].score(length_penalty)
        ):
            break
    best = sorted([*done, *live], key=lambda beam: -beam.score(length_penalty))[:width]
    assert first is not None and last is not None, "there is at least one token"
    timings = replace(first.timings, latency_s=last.timings.latency_s)
    output = RequestOutput.begun(request)
    output.outputs = [_output(reply, index, beam, request, timings) for index, beam in enumerate(best)]
    output.num_cached_tokens = first.num_cached_tokens
    return output


async def _continued(
    reply: "Reply", name: str, request: Request, beams: Sequence[_Beam], num_top: int
) -> tuple[list[_Beam], Finish]:
    """Return what `beams` may become with one more token, and how the first one's round ended."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=num_top, seed=request.params.seed)
    ids = {f"{name}-{index}": beam for index, beam in enumerate(beams)}
    rounds = [
        replace(request, request_id=key, prompt_ids=(*request.prompt_ids, *beam.token_ids), params=params, max_tokens=1)
        for key, beam in ids.items()
    ]
    found: list[_Beam] = []
    finish: Finish | None = None
    async with aclosing(reply.service.engine.stream(*rounds)) as deltas:
        async for delta in deltas:
            beam = ids[delta.request_id]
            for logprob in delta.logprobs:
                for rank, (token_id, value) in enumerate(logprob.top, 1):
                    token = TokenLogprob(token_id, value, rank, logprob.top)
                    found.append(_Beam((*beam.logprobs, token), beam.total + value, ends=token_id in request.stop_ids))
            if delta.finish is not None:
                reply.check(delta.finish)
                finish = finish or delta.finish
    assert finish is not None, "a stream has an end"
    return found, finish


def _output(reply: "Reply", index: int, beam: _Beam, request: Request, timings: Timings) -> CompletionOutput:
    """Return a beam as what a request gives."""
    token_ids, asked = beam.token_ids, request.params.logprobs
    text, tokenizer = "", reply.service.tokenizer
    if tokenizer is not None:
        making = detokenizer_of(tokenizer, request)
        text = making.feed(token_ids[: len(token_ids) - beam.ends]) + making.flush()
    logprobs = None if asked is None else [replace(each, top=each.top[:asked]) for each in beam.logprobs]
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=beam.total,
        logprobs=logprobs,
        finish_reason="stop" if beam.ends else "length",
        timings=timings.of_tokens(len(token_ids)),
    )
