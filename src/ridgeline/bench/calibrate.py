"""Calibration: a few kinds of steps are timed op by op, and the efficiencies of the ops fitted. At most a minute."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from statistics import median

from ridgeline.bench.profile import Profiler
from ridgeline.core.errors import ConfigError
from ridgeline.cost.efficiency import VERSION, Calibration, Rest, Sample, fit, held_out_error, keys_of
from ridgeline.cost.steptime import StepTime

LIMIT_S = 50.0  # and then MIXED_S
MIN_STEPS, MAX_STEPS, STEPS_S = 3, 12, 0.03  # of a kind, and about how long they take together
REPEATS, CHEAP_S = 8, 1.0  # they are timed so often, in so many seconds
MIXED_STEPS, MIXED_S = 2400, 10.0  # of requests that come and go, at most: what is around the ops
MIXED_ROUNDS, MIN_MIXED = 4, 100  # of the same ones, where so many fit into each
MEANS = (1.0, 1.5)  # of what steps take over what half of them do: what is beyond was no usual time
USUAL_REST = Rest(40e-6, 5e-6, 100e-6, 10e-6, 100e-6, 100e-6, 50e-6, 5e-7)  # of a fast core: what steps do not tell
LOADS = (  # sequences, and the context in which each decodes, or else the tokens of the prompt that each has
    (1, 64, 0), (1, 0, 16), (4, 96, 0), (1, 0, 4), (8, 64, 0), (1, 0, 64), (1, 256, 0), (1, 0, 128), (16, 64, 0),
    (1, 0, 32), (8, 0, 2), (2, 96, 0), (1, 0, 8), (4, 256, 0), (1, 0, 256), (16, 0, 4), (1, 768, 0),
)  # fmt: skip
MAX_BATCH = max(batch for batch, _, _ in LOADS)
MAX_PROMPT = max(prompt for _, _, prompt in LOADS)


def calibration(profiler: Profiler, num_threads: int) -> Calibration:
    """Profile decode and prefill steps of several sizes, small ones first, and fit what they reached.

    Sizes beyond the engine's context are left out, and so is what would pass LIMIT_S. The engine needs room for
    MAX_BATCH sequences and steps of MAX_PROMPT tokens. Raises ConfigError where nothing could be timed.
    """
    started, slowest, max_tokens = time.monotonic(), 0.0, profiler.max_model_len
    profiled = {load: list[list[Sample]]() for load in LOADS}
    spent_s, num_steps = dict.fromkeys(LOADS, 0.0), dict.fromkeys(LOADS, MIN_STEPS)
    mixed_steps = partial(profiler.mixed, MIXED_STEPS // MIXED_ROUNDS, MIXED_S / MIXED_ROUNDS)
    rounds = [mixed_steps()]
    for number, load in enumerate(LOADS * REPEATS):  # in turn: what else the machine does for some seconds spoils none
        if number and number % (len(LOADS) * REPEATS // MIXED_ROUNDS) == 0 and len(rounds[0]) >= MIN_MIXED:
            rounds.append(mixed_steps())
        (batch, context, prompt), begun = load, time.monotonic()
        if max(context, prompt + 1) > max_tokens or spent_s[load] > CHEAP_S or begun - started + 2 * slowest > LIMIT_S:
            continue
        run = partial(profiler.decode, batch, context) if context else partial(profiler.prefill, prompt, count=batch)
        try:
            profile = run(num_steps[load])
        except ConfigError:
            spent_s[load] = LIMIT_S  # the cache has no room for so many
            continue
        profiled[load].append(profiler.samples)
        num_steps[load] = min(max(int(STEPS_S / profile.step_s), MIN_STEPS), MAX_STEPS)
        took_s = time.monotonic() - begun
        spent_s[load], slowest = spent_s[load] + took_s, max(slowest, took_s)
    # Nearly the least of each op: what others do makes none shorter, and those longer that compute most.
    of_ops = (times for repeats in profiled.values() for times in zip(*repeats, strict=True))
    samples = [sorted(times, key=lambda each: each.measured_s)[len(times) // REPEATS] for times in of_ops]
    if not samples:
        raise ConfigError("no step could be timed: raise --context or the cache's bytes")
    moments, kinds = profiler.moments, profiler.moments[0].ops_per_s
    found = Calibration(
        version=VERSION,
        num_threads=num_threads,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        efficiencies=fit(samples),
        held_out_error=held_out_error(samples),
        stream_bytes_per_s=median(each.stream(num_threads) for each in moments),
        ops_per_s={kind: median(each.peak(kind, num_threads) or 0.0 for each in moments) for kind in kinds},
    )
    time_of_ops = StepTime(profiler.program, profiler.pieces, moments[0].calibrated(found), num_threads, found)
    if len(rounds[0]) < MIN_MIXED:  # of a large model
        rounds = [profiler.mixed(MIXED_STEPS, MIXED_S)]
    # The same steps in each round: the one that took the median time, or less.
    mixed = [sorted(times, key=lambda each: each[2])[(len(times) - 1) // 2] for times in zip(*rounds)]
    time_of_steps = time_of_ops.with_rest(USUAL_REST).fitted(mixed, with_ops=True)
    took_s = sum(seconds for times in zip(*rounds) for _, _, seconds in times) / len(rounds)
    predicted_s = sum(time_of_steps.seconds(load, behind) for load, behind, _ in mixed)
    rest, mean = time_of_steps.rest, min(max(took_s / predicted_s, MEANS[0]), MEANS[1])
    return replace(found, rest=rest, rests={keys_of(profiler.pieces): rest}, mean=mean)
