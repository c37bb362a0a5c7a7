"""Bound the time between tokens: how much of a prompt a step may compute beside sequences that decode.

Prompts are cut in chunks anyway (Sarathi-Serve, OSDI 2024); here the chunk is what the bound leaves. Called by the
scheduler, which tells what its steps took. No clock.
"""

from ridgeline.core.step import StepPlan

MIN_CHUNK_TOKENS = 16  # of prompts, where decoding alone takes as long as the bound: they must go on
WEIGHT = 0.25  # of the newest step in the estimates


class Pacing:
    """Estimate steps as the seconds of one that only decodes, and seconds for each prompt token beside it."""

    def __init__(self, max_itl_s: float | None) -> None:
        self._max_itl_s = max_itl_s
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def max_prompt_tokens(self, num_decoding: int) -> int | None:
        """Return how many prompt tokens fit beside `num_decoding` sequences within the bound; None: no bound."""
        if self._max_itl_s is None or not num_decoding or not self._token_s:
            return None
        left_s = self._max_itl_s - (self._decode_s or 0.0)
        return max(MIN_CHUNK_TOKENS, int(left_s / self._token_s))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take in what a step took, in seconds."""
        if self._max_itl_s is None:
            return
        num_prompt = sum(len(span.token_ids) for span in plan.spans if len(span.token_ids) > 1)
        if not num_prompt:
            self._decode_s = _moved(self._decode_s, seconds)
            return
        decodes = num_prompt < plan.num_tokens
        self._token_s = _moved(self._token_s, max(seconds - (self._decode_s or 0.0) * decodes, 0.0) / num_prompt)


def _moved(estimate: float | None, value: float) -> float:
    return value if estimate is None else estimate + WEIGHT * (value - estimate)
