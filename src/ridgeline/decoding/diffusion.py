"""Masked diffusion, block by block: a block of masks is denoised in a few steps, then the next one is begun.

LLaDA (arXiv 2502.09992) with the keys and values of finished blocks in the cache (block diffusion, arXiv 2503.09573;
Fast-dLLM, arXiv 2505.22618). The prompt is one run of mutually visible tokens, every block another:

    step 1   [prompt             ]
    step 2                        [M M M M]                 the prompt is final
    step 3                        [a M c M]
    step 4                        [a b c d][M M M M]        the block is final once it is computed without masks

The last step of a block and the first of the next are one span of two runs. Called by the scheduler.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from ridgeline.core.params import DiffusionParams, SamplingParams
from ridgeline.core.step import SampledToken, SampleRow, Span
from ridgeline.decoding.draw import random_word
from ridgeline.decoding.strategy import Answer

EXCLUDED = -100.0  # logit bias that keeps the mask itself from being drawn
STEP_STRIDE = 0xD1342543DE82EF95  # odd: every step of a block has a random stream of its own


@dataclass(slots=True)
class _Block:
    """The block being denoised: None where it is still masked."""

    start: int
    decided: list[SampledToken | None]
    steps_left: int
    step: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)

    def masked(self) -> list[int]:
        return [offset for offset, token in enumerate(self.decided) if token is None]


class MaskedDiffusion:
    """Strategy of models that fill in masks; `mask_id` is their mask token."""

    def __init__(self, mask_id: int) -> None:
        self._mask_id = mask_id
        self._blocks: dict[int, _Block] = {}  # by sequence; it survives preemption

    def next_span(self, answer: Answer, max_tokens: int, *, score_all: bool) -> Span | None:
        start, known, num_prompt = answer.num_computed, answer.token_ids, len(answer.prompt_ids)
        if start < num_prompt:
            rest = known[start:num_prompt]
            return Span(answer.seq_id, start, rest, 0, mutual=len(rest)) if len(rest) <= max_tokens else None
        length = _options(answer).block_length
        begun = (start - num_prompt) % length
        if begun:  # a prefix hit ended within a block
            rest = known[start : start + length - begun]
            return Span(answer.seq_id, start, rest, 0, mutual=length) if len(rest) <= max_tokens else None
        final = known[start:]  # whole blocks: after a preemption several
        block = self._block(answer)
        if len(final) + len(block.decided) <= max_tokens:
            tokens = [*final, *(self._mask_id if token is None else token.token_id for token in block.decided)]
            num_rows = len(block.decided)
            return Span(answer.seq_id, start, tokens, num_rows, mutual=length, num_kept=len(final))
        num_final = min(max_tokens, len(final)) // length * length
        return Span(answer.seq_id, start, final[:num_final], 0, mutual=length) if num_final else None

    def rows(self, answer: Answer, span: Span, first_row: int) -> Sequence[SampleRow]:
        if not span.num_logit_rows:
            return ()
        block, num_prompt = self._block(answer), len(answer.prompt_ids)
        return [
            SampleRow(
                seq_id=answer.seq_id,
                row=first_row + offset,
                params=block.params,
                seed=(answer.seed + block.step * STEP_STRIDE) % 2**64,
                num_output=block.start + offset - num_prompt,
                prompt_ids=answer.prompt_ids,
                output_ids=answer.token_ids[num_prompt:] if answer.params.needs_history else (),
                stop_ids=answer.stop_ids,
            )
            for offset in block.masked()
        ]

    def accept(self, answer: Answer, span: Span, sampled: Sequence[SampledToken]) -> Sequence[SampledToken]:
        block = self._blocks[answer.seq_id]
        offsets = block.masked()
        for index in self._chosen(answer, block, sampled):
            token = sampled[index]
            wants_logprob = answer.params.logprobs is not None
            block.decided[offsets[index]] = token if wants_logprob else replace(token, logprob=None)
        block.step += 1
        block.steps_left -= 1
        if block.masked():
            return ()
        del self._blocks[answer.seq_id]
        return [token for token in block.decided if token is not None]

    def salt(self, answer: Answer) -> str:
        """A token's keys depend on its whole run: on all of the prompt, and on how the answer is cut."""
        prompt = sha256(repr(list(answer.prompt_ids)).encode()).hexdigest()
        return f"\0diffusion {_options(answer).block_length} {prompt}"

    def forget(self, answer: Answer) -> None:
        self._blocks.pop(answer.seq_id, None)

    def _block(self, answer: Answer) -> _Block:
        """The block after the last known token, made of masks if it is new."""
        if answer.seq_id not in self._blocks:
            options, params = _options(answer), answer.params
            start = len(answer.token_ids)
            length = min(options.block_length, answer.max_tokens - (start - len(answer.prompt_ids)))
            bias = {**params.logit_bias, self._mask_id: EXCLUDED}
            shown = replace(params, logit_bias=bias, logprobs=params.logprobs or 0)  # the confidence of every token
            steps = min(options.steps or length, length)
            self._blocks[answer.seq_id] = _Block(start, [None] * length, steps, params=shown)
        return self._blocks[answer.seq_id]

    def _chosen(self, answer: Answer, block: _Block, sampled: Sequence[SampledToken]) -> list[int]:
        """Which of the tokens stay: the surest, or any; the others are masked again."""
        options = _options(answer)
        least = math.ceil(len(sampled) / block.steps_left)
        if options.remasking == "random":
            order = sorted(range(len(sampled)), key=lambda i: random_word(answer.seed ^ STEP_STRIDE, block.start + i))
        else:
            order = sorted(range(len(sampled)), key=lambda i: -_confidence(sampled[i]))
        if options.threshold is not None:
            least = max(1, sum(_confidence(token) >= options.threshold for token in sampled))
        return order[: len(sampled) if block.steps_left == 1 else least]


def _options(answer: Answer) -> DiffusionParams:
    return answer.params.diffusion or DiffusionParams()


def _confidence(token: SampledToken) -> float:
    """The probability that the model gives the token."""
    return math.exp(token.logprob.logprob) if token.logprob is not None else 0.0
