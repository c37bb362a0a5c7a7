"""Bound the time between tokens: how much of a prompt a step may compute beside sequences that decode.

Prompts are cut in chunks anyway (Sarathi-Serve, OSDI 2024); here the chunk is what the bound leaves. No clock.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence as Items

from ridgeline.core.config import SchedulerConfig
from ridgeline.core.step import StepPlan
from ridgeline.engine.request import Sequence

MIN_CHUNK_TOKENS = 4  # of prompts, that a bound may leave
UNBOUND_CHUNK_TOKENS = 16  # where it leaves fewer, as decoding alone takes so long: prompts must go on
RECENT = 40  # steps in an estimate
LESS, MORE, LEAST = 0.8, 1.001, 0.25  # of a chunk, after a step over the aim and one within: 0.5 % are over it then
AIM = 0.9  # of the bound: what is around a step is a part of the time between tokens
FIRST_CHUNK_TOKENS = 64  # of prompts, before it is known what one adds
MAX_UNMEASURED = 24  # steps with prompts in a row, before one is planned that only decodes


class Pacing:
    """Estimate what recent steps took that only decode, by their tokens, and what a token of a prompt adds to one."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_s = math.inf if config.max_itl_s is None else config.max_itl_s
        self._max_ratio = config.max_itl_ratio or math.inf
        self._decode_s = defaultdict[int, deque[float]](lambda: deque(maxlen=RECENT))  # by the bit length of the tokens
        self._least_s: dict[int, float] = {}  # of these, where several are known: one may have been held up
        self._mixed: deque[tuple[int, int, float]] = deque(maxlen=RECENT)  # steps: tokens of prompts, others, seconds
        self._share = 1.0  # of what the bound leaves, so that nearly all steps keep it
        self._num_unmeasured = 0  # steps since the last one that only decoded

    def max_tokens(self, running: Items[Sequence], limit: int) -> int:
        """Return how many tokens, up to `limit`, a step of `running` and of new sequences may have.

        One for each where a step that only decodes has to be measured: what it takes is part of every bound.
        """
        has_bound = min(self._max_s, self._max_ratio) < math.inf
        num_decoding = sum([seq.is_decoding for seq in running]) if has_bound else 0
        if not num_decoding:
            return limit
        if not self._mixed:
            return min(limit, len(running) + FIRST_CHUNK_TOKENS)
        decode_s = self._decoding_s(len(running).bit_length())
        if decode_s is None or self._num_unmeasured >= MAX_UNMEASURED:
            return min(limit, len(running))
        token_s = self._prompt_token_s()
        if token_s == 0:
            return limit
        left = (self._aim_s(decode_s) - decode_s) / token_s
        chunk = max(int(left * self._share), MIN_CHUNK_TOKENS) if left >= MIN_CHUNK_TOKENS else UNBOUND_CHUNK_TOKENS
        return min(limit, max(len(running), num_decoding + chunk))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take in what a step took, in seconds."""
        if self._max_s == self._max_ratio == math.inf:
            return  # so that no estimate ever is there
        spans = () if plan.follows else plan.spans
        num_prompt = sum([len(span.token_ids) for span in spans if len(span.token_ids) > 1 + span.num_optional])
        num_others = plan.num_tokens - num_prompt
        if not num_prompt:
            recent_s = self._decode_s[num_others.bit_length()]
            recent_s.append(seconds)
            if len(recent_s) > 1:
                self._least_s[num_others.bit_length()] = min(recent_s)
            self._num_unmeasured = 0
            return
        self._num_unmeasured += num_others > 0
        if num_prompt >= MIN_CHUNK_TOKENS:  # what fewer add is mostly noise
            self._mixed.append((num_prompt, num_others, seconds))
            if num_others and (decode_s := self._decoding_s(num_others.bit_length())) is not None:
                is_over = seconds > self._aim_s(decode_s)
                self._share = max(self._share * LESS, LEAST) if is_over else min(self._share * MORE, 1.0)

    def _prompt_token_s(self) -> float:
        """Return the seconds that a token of a prompt adds to a step, at the median."""
        decode_s = {size: self._decoding_s(size) or 0.0 for size in {num.bit_length() for _, num, _ in self._mixed}}
        known_s = sorted(
            [max(seconds - decode_s[num.bit_length()], 0.0) / num_prompt for num_prompt, num, seconds in self._mixed]
        )
        return known_s[len(known_s) // 2]

    def _aim_s(self, decode_s: float) -> float:
        return AIM * min(self._max_s, self._max_ratio * decode_s)

    def _decoding_s(self, size: int) -> float | None:
        """Return the least seconds of recent steps that only decode: those of prompts that come hold up many at once.

        Steps of that size count, or of the next smaller where none was measured; one of more tokens takes no less.
        """
        nearest = min(self._least_s, key=lambda known: (known > size, abs(known - size)), default=0)
        least_s = [each_s for known, each_s in self._least_s.items() if known == nearest or known > size]
        return min(least_s, default=None)
