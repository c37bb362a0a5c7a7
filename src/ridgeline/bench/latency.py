"""Prefill and decode apart, as llama-bench's pp and tg: P tokens of one prompt, and one token each of B sequences.

Called by the command line.
"""

from collections.abc import Sequence

from ridgeline.bench.offline import BenchEngine, OfflineRun, spread
from ridgeline.bench.offline_report import LatencyPoint, LatencyReport
from ridgeline.bench.workload import require
from ridgeline.bench.workloads.fixed import Fixed
from ridgeline.core.errors import ConfigError


def measure_latency(
    bench: BenchEngine,
    *,
    name: str,
    prefill: Sequence[int],
    decode: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    warmups: int,
) -> LatencyReport:
    """Return prompts of each length in `prefill`, then batches of each size in `decode`.

    Each batch is given `prompt_tokens` per sequence and decodes `output_tokens`. Raises ConfigError for options out
    of range, RequestError for lengths that the model cannot take.
    """
    require(repeats >= 1, "repeats", repeats, "1 or more")
    require(warmups >= 0, "warmups", warmups, "0 or more")
    limit = bench.config.scheduler.max_num_seqs
    for size in decode:
        require(1 <= size <= limit, "decode", size, f"in 1..{limit} (max_num_seqs)")
    points = [_prefill_point(bench, length, repeats, warmups) for length in prefill]
    points += [_decode_point(bench, size, prompt_tokens, output_tokens, repeats, warmups) for size in decode]
    return LatencyReport(
        name=name,
        engine=bench.facts(),
        warmups=warmups,
        repeats=repeats,
        prompt_tokens=prompt_tokens,
        points=points,
    )


def _prefill_point(bench: BenchEngine, length: int, repeats: int, warmups: int) -> LatencyPoint:
    shape = Fixed(num_requests=1, input_tokens=length, output_tokens=1, vocab_size=bench.engine.spec.vocab_size)
    runs = _runs(bench, shape, repeats, warmups)
    return _point("prefill", length, runs, [length / run.log.duration_s for run in runs])


def _decode_point(
    bench: BenchEngine, size: int, prompt_tokens: int, output_tokens: int, repeats: int, warmups: int
) -> LatencyPoint:
    shape = Fixed(
        num_requests=size,
        input_tokens=prompt_tokens,
        output_tokens=output_tokens + 1,
        vocab_size=bench.engine.spec.vocab_size,
    )
    runs = _runs(bench, shape, repeats, warmups)
    return _point("decode", size, runs, [_full_batch_rate(run) for run in runs])


def _runs(bench: BenchEngine, shape: Fixed, repeats: int, warmups: int) -> list[OfflineRun]:
    """Return the runs after the warm-up; the same prompts each time, which no run finds in the cache."""
    asked = shape.requests()
    runs = [bench.run(bench.requests(asked, temperature=0.0)) for _ in range(warmups + repeats)]
    return runs[warmups:]


def _full_batch_rate(run: OfflineRun) -> float:
    """Return output tokens per second while all sequences decode: from the last first token to the first end."""
    start_s = max(record.chunk_times_s[0] for record in run.log.records)
    end_s = min(record.end_s for record in run.log.records)
    if end_s <= start_s:
        raise ConfigError("the first sequence ended before the last one began to decode: ask for more output tokens")
    tokens = sum(start_s < time_s <= end_s for record in run.log.records for time_s in record.chunk_times_s)
    return tokens / (end_s - start_s)


def _point(kind: str, tokens_per_step: int, runs: Sequence[OfflineRun], rates: list[float]) -> LatencyPoint:
    rate = spread(rates)
    cost = runs[rates.index(rate.median)].scheduling
    assert cost is not None, "the engine has a scheduler"
    return LatencyPoint(
        kind=kind,
        tokens_per_step=tokens_per_step,
        tok_per_s=rate,
        ms=tokens_per_step / rate.median * 1000,
        scheduling=cost,
    )
