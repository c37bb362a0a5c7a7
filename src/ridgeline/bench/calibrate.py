"""Calibration: a few kinds of steps are timed op by op, and the efficiencies of the ops fitted. At most a minute."""

import time
from datetime import UTC, datetime

from ridgeline.bench.profile import Profiler
from ridgeline.core.errors import ConfigError
from ridgeline.cost.efficiency import VERSION, Calibration, fit, fit_rest, held_out_error

LIMIT_S = 60.0
NUM_STEPS = 3
DECODES = ((1, 64), (4, 96), (8, 64), (1, 256), (16, 64), (4, 256), (1, 768))  # (batch, context in tokens)
MAX_BATCH = max(batch for batch, _ in DECODES)
PROMPTS = (16, 4, 64, 128, 32, 256)  # tokens
MAX_PROMPT = max(PROMPTS)


def calibration(profiler: Profiler, num_threads: int) -> Calibration:
    """Profile decode and prefill steps of several sizes, small ones first, and fit what they reached.

    Sizes beyond the engine's context are left out, and so is what would pass LIMIT_S. The engine needs room for
    MAX_BATCH sequences and steps of MAX_PROMPT tokens. Raises ConfigError where nothing could be timed.
    """
    started, slowest, max_tokens = time.monotonic(), 0.0, profiler.max_model_len
    for (batch, context), prompt in zip(DECODES, (*PROMPTS, 0)):
        for work in ("decode", "prefill"):
            begun = time.monotonic()
            if begun - started + 2 * slowest > LIMIT_S:
                break
            try:
                if work == "decode" and context <= max_tokens:
                    profiler.decode(batch, context, NUM_STEPS)
                elif work == "prefill" and 0 < prompt < max_tokens:
                    profiler.prefill(prompt, NUM_STEPS)
            except ConfigError:
                continue  # the cache has no room for so many
            slowest = max(slowest, time.monotonic() - begun)
    if not profiler.samples:
        raise ConfigError("no step could be timed: raise --context or the cache's bytes")
    return Calibration(
        version=VERSION,
        num_threads=num_threads,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        efficiencies=fit(profiler.samples),
        held_out_error=held_out_error(profiler.samples),
        rest=fit_rest(profiler.rests),
    )
