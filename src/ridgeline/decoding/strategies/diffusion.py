"""Masked diffusion, block by block: a block of masks is denoised in a few steps, then the next one is begun.

LLaDA (arXiv 2502.09992) with the keys and values of finished blocks in the cache (block diffusion, arXiv 2503.09573;
Fast-dLLM, arXiv 2505.22618). The prompt is one run of tokens that attend to each other, every block another:

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

from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.params import DiffusionParams, SamplingParams
from ridgeline.core.step import SampledToken, SampleRow, Span
from ridgeline.decoding.random_sample import random_word
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.decoding.strategy import Accepted, SequenceView, sample_row
from ridgeline.spec.spec import DecoderSpec

STEP_STRIDE = 0xD1342543DE82EF95  # odd: every step of a block has a random stream of its own


def build(spec: DecoderSpec, config: EngineConfig, clock: Clock) -> "MaskedDiffusion":
    assert spec.diffusion is not None
    return MaskedDiffusion(spec.diffusion.mask_id)


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


class MaskedDiffusion(Autoregressive):
    """Strategy of models that fill in masks; `mask_id` is their mask token."""

    rolls_back = True  # a block is computed again until it is whole
    one_token = False

    def __init__(self, mask_id: int) -> None:
        self._mask_id = mask_id
        self._blocks: dict[int, _Block] = {}  # by sequence; it survives preemption

    def next_span(self, view: SequenceView, max_tokens: int, *, score_all: bool) -> Span | None:
        start, known, num_prompt = view.num_computed, view.token_ids, len(view.request.prompt_ids)
        if start < num_prompt:
            rest = known[start:num_prompt]
            return _span(view, rest, len(rest)) if len(rest) <= max_tokens else None
        length = _options(view).block_length
        begun = (start - num_prompt) % length
        if begun:  # a prefix hit ended within a block
            rest = known[start : start + length - begun]
            return _span(view, rest, length) if len(rest) <= max_tokens else None
        final = known[start:]  # whole blocks: after a preemption several
        block = self._block(view)
        if len(final) + len(block.decided) <= max_tokens:
            masked = [self._mask_id if token is None else token.token_id for token in block.decided]
            return _span(view, [*final, *masked], length, num_rows=len(masked))
        num_final = min(max_tokens, len(final)) // length * length
        return _span(view, final[:num_final], length) if num_final else None

    def rows(self, view: SequenceView, span: Span, first_row: int) -> Sequence[SampleRow]:
        if not span.num_logit_rows:
            return ()
        block, num_prompt = self._block(view), len(view.request.prompt_ids)
        seed, stop_ids = (view.seed + block.step * STEP_STRIDE) % 2**64, tuple(view.request.stop_ids)
        own = {"params": block.params, "seed": seed, "stop_ids": stop_ids, "banned_ids": (self._mask_id,)}
        places = [(first_row + offset, block.start + offset - num_prompt) for offset in block.masked()]
        return [sample_row(view, *place)._replace(**own) for place in places]

    def accept(self, view: SequenceView, span: Span, sampled: Sequence[SampledToken]) -> Accepted:
        block = self._blocks[view.seq_id]
        num_final = block.start - span.start  # the blocks before it, computed without masks
        offsets = block.masked()
        for index in self._chosen(view, block, sampled):
            token = sampled[index]
            wants_logprob = view.request.params.logprobs is not None
            block.decided[offsets[index]] = token if wants_logprob else token._replace(logprob=None)
        block.step += 1
        block.steps_left -= 1
        if block.masked():
            return Accepted((), num_final)
        del self._blocks[view.seq_id]
        return Accepted([token for token in block.decided if token is not None], num_final)

    def salt(self, view: SequenceView) -> str:
        """Return a salt of the whole run: a token's keys depend on all of the prompt and on how the output is cut."""
        prompt = sha256(repr(list(view.request.prompt_ids)).encode()).hexdigest()
        return f"\0diffusion {_options(view).block_length} {prompt}"

    def forget(self, view: SequenceView) -> None:
        self._blocks.pop(view.seq_id, None)

    def _block(self, view: SequenceView) -> _Block:
        """Return the block after the last known token, made of masks if it is new."""
        if view.seq_id not in self._blocks:
            options, params = _options(view), view.request.params
            start = len(view.token_ids)
            length = min(options.block_length, view.request.max_tokens - (start - len(view.request.prompt_ids)))
            shown = replace(params, logprobs=params.logprobs or 0)  # the confidence of every token
            steps = min(options.steps or length, length)
            self._blocks[view.seq_id] = _Block(start, [None] * length, steps, params=shown)
        return self._blocks[view.seq_id]

    def _chosen(self, view: SequenceView, block: _Block, sampled: Sequence[SampledToken]) -> list[int]:
        """Choose which of the tokens stay: the surest, or any; the others are masked again."""
        options = _options(view)
        least = math.ceil(len(sampled) / block.steps_left)
        if options.remasking == "random":
            order = sorted(range(len(sampled)), key=lambda i: random_word(view.seed ^ STEP_STRIDE, block.start + i))
        else:
            order = sorted(range(len(sampled)), key=lambda i: -_confidence(sampled[i]))
        if options.threshold is not None:
            least = max(1, sum(_confidence(token) >= options.threshold for token in sampled))
        return order[: len(sampled) if block.steps_left == 1 else least]


def _span(view: SequenceView, token_ids: Sequence[int], bidirectional_block: int, num_rows: int = 0) -> Span:
    start, adapter = view.num_computed, view.request.adapter
    return Span(view.seq_id, start, token_ids, num_rows, bidirectional_block=bidirectional_block, adapter=adapter)


def _options(view: SequenceView) -> DiffusionParams:
    return view.request.params.diffusion or DiffusionParams()


def _confidence(token: SampledToken) -> float:
    """Return the probability that the model gives the token."""
    return math.exp(token.logprob.logprob) if token.logprob is not None else 0.0
