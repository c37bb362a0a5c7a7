"""Canary: single prompts, scored again with exact keys and values, tell what rounding these costs on real traffic."""

import asyncio
import contextlib
import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from ridgeline.core.log import get_logger

log = get_logger("canary")

LIMIT_BITS = 0.05  # of KL per token: beyond it quality is no more `standard`
FEWEST, MOST = 8, 256  # prompts that a verdict rests on
MIN_TOKENS, MAX_TOKENS = 32, 8192  # of a prompt; of a longer one its end
TIMEOUT_S = 600.0


class Canary:
    """Scores every `every`th prompt, one at a time, in a process of lowest priority; the others are let go."""

    def __init__(self, every: int, model: str, options: Mapping[str, str | int | bool], kv_dtype: str) -> None:
        self._every, self._sample = every, {"model": model, "options": dict(options), "kv_dtype": kv_dtype}
        self._num_offered = 0
        self._task: asyncio.Task[None] | None = None
        self._kl_bits: deque[float] = deque(maxlen=MOST)
        self.num_scored = 0
        self._is_alarmed = False

    @property
    def kl_bits(self) -> float:
        """The mean of late prompts; NaN before the first."""
        return statistics.fmean(self._kl_bits) if self._kl_bits else math.nan

    @property
    def least_kl_bits(self) -> float:
        """The lower end of its 95 % interval; NaN of fewer than FEWEST."""
        if len(self._kl_bits) < FEWEST:
            return math.nan
        return self.kl_bits - 1.96 * statistics.stdev(self._kl_bits) / math.sqrt(len(self._kl_bits))

    def offer(self, token_ids: Sequence[int]) -> None:
        """Take or leave a prompt whose output has ended; on the event loop."""
        self._num_offered += 1
        is_free = self._task is None or self._task.done()
        if self._num_offered % self._every == 0 and is_free and len(token_ids) >= MIN_TOKENS:
            self._task = asyncio.create_task(self._score(list(token_ids[-MAX_TOKENS:])))

    async def close(self) -> None:
        """Let go of the prompt at hand."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _score(self, token_ids: list[int]) -> None:
        command, pipe = (sys.executable, "-m", "ridgeline.quality.canary"), asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            sample = msgspec.json.encode({**self._sample, "token_ids": token_ids})
            said, _ = await asyncio.wait_for(process.communicate(sample), TIMEOUT_S)
            self._take_in(msgspec.json.decode(said)["kl_bits"])
        except (msgspec.DecodeError, TimeoutError):
            log.warning("a prompt could not be scored with exact keys and values; see the error above")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _take_in(self, kl_bits: float) -> None:
        self._kl_bits.append(kl_bits)
        self.num_scored += 1
        was, self._is_alarmed = self._is_alarmed, self.least_kl_bits > LIMIT_BITS
        if self._is_alarmed and not was:
            what = f"keys and values in {self._sample['kv_dtype']} cost {self.kl_bits:.3f} bits of KL per token"
            log.warning("%s on late prompts, at least %.3f; use another --kv-dtype", what, self.least_kl_bits)
