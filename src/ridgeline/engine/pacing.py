"""Bound the time between tokens: how much of a prompt a step may compute beside sequences that decode.

Prompts are cut in chunks anyway (Sarathi-Serve, OSDI 2024); here the chunk is what the bound leaves. No clock.
"""

import math
from collections import deque
from collections.abc import Sequence as Items

from ridgeline.core.config import SchedulerConfig
from ridgeline.core.step import StepPlan
from ridgeline.engine.request import Sequence

MIN_CHUNK_TOKENS = 16  # of prompts, where decoding alone takes as long as the bound: they must go on
RECENT = 7  # steps in an estimate: it follows within a few, and one that was held up does not move it
FIRST_CHUNK_TOKENS = 64  # of prompts, before it is known what one adds
MAX_UNMEASURED = 16  # steps with prompts in a row, before one is planned that only decodes


class Pacing:
    """Estimate what recent steps took that only decode, by their tokens, and what a token of a prompt adds to one."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_s = math.inf if config.max_itl_s is None else config.max_itl_s
        self._max_ratio = config.max_itl_ratio or math.inf
        self._decode_s: dict[int, deque[float]] = {}  # by the power of two that the number of tokens is below
        self._token_s: deque[float] = deque(maxlen=RECENT)
        self._num_unmeasured = 0  # steps since the last one that only decoded

    def max_tokens(self, running: Items[Sequence], limit: int) -> int:
        """Return how many tokens, up to `limit`, a step of `running` and of new sequences may have.

        One for each where a step that only decodes has to be measured: what it takes is part of every bound.
        """
        token_s = sorted(self._token_s)[-2:][:1]  # the bound is to hold for nearly all steps, not for half of them
        has_bound = min(self._max_s, self._max_ratio) < math.inf
        if token_s == [0.0] or not has_bound or not any(seq.is_decoding for seq in running):
            return limit
        if not token_s:
            return min(limit, len(running) + FIRST_CHUNK_TOKENS)
        decode_s = self._decoding_s(len(running))
        if decode_s is None or self._num_unmeasured >= MAX_UNMEASURED:
            return min(limit, len(running))
        left_s = min(self._max_s, self._max_ratio * decode_s) - decode_s
        return min(limit, len(running) + max(MIN_CHUNK_TOKENS, int(left_s / token_s[0])))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take in what a step took, in seconds."""
        if self._max_s == self._max_ratio == math.inf:
            return  # so that no estimate ever is there
        spans = () if plan.follows else plan.spans
        num_prompt = sum([len(span.token_ids) for span in spans if len(span.token_ids) > 1 + span.num_optional])
        num_others = plan.num_tokens - num_prompt
        if not num_prompt:
            self._decode_s.setdefault(num_others.bit_length(), deque(maxlen=RECENT)).append(seconds)
            self._num_unmeasured = 0
            return
        self._num_unmeasured += num_others > 0
        if num_prompt >= MIN_CHUNK_TOKENS:  # what fewer add is mostly noise
            self._token_s.append(max(seconds - (self._decoding_s(num_others) or 0.0), 0.0) / num_prompt)

    def _decoding_s(self, num_tokens: int) -> float | None:
        """Return the least seconds of recent steps that only decode: those of prompts that come hold up many at once.

        Steps of that size count, or of the next smaller where none was measured; one of more tokens takes no less.
        """
        if not self._decode_s:
            return None
        size = num_tokens.bit_length()
        nearest = min(self._decode_s, key=lambda known: (known > size, abs(known - size)))
        return min(min(each) for known, each in self._decode_s.items() if known == nearest or known > size)
