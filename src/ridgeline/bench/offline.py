"""Offline runs: a workload through an engine in this process, with the times of every token and the scheduler's cost;
and prefill and decode apart, as llama-bench's pp and tg: P tokens of one prompt, and one token each of B sequences.

All requests are there from the start, so TTFT and E2EL include the wait for a place in the batch.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.bench.arrivals import Arrivals
from ridgeline.bench.metrics import summarize
from ridgeline.bench.offline_report import (
    EngineFacts,
    LatencyPoint,
    LatencyReport,
    OfflineReport,
    SchedulingCost,
    Spread,
    SystemResult,
)
from ridgeline.bench.record import RunLog
from ridgeline.bench.workload import BenchRequest, Workload, require
from ridgeline.bench.workloads import describe_workload
from ridgeline.bench.workloads.fixed import Fixed
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.params import SamplingParams
from ridgeline.decoding.request import Request
from ridgeline.engine.build import build_engine
from ridgeline.engine.journal import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """One run of one system: the times and the tokens of every request, in the order of the requests."""

    log: RunLog
    token_ids: list[list[int]]
    scheduling: SchedulingCost | None = None
    idle_slot_share: float | None = None


System = Callable[[Sequence[Request]], OfflineRun]
"""Runs all requests, which are there from the start."""


class BenchEngine:
    """Runs an engine in this thread. Raises what `build_engine` does."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._arrivals = Arrivals()
        self._runs = itertools.count()
        self.engine = build_engine(config, self._arrivals.deliver)

    def requests(self, workload: Sequence[BenchRequest], *, temperature: float) -> list[Request]:
        """Make requests for one run: they share prefixes with each other, but find nothing that another run cached.

        Raises RequestError for a request that this model cannot take.
        """
        intake, salt = self.engine.intake, f"run {next(self._runs)}"
        made: list[Request] = []
        for seed, asked in enumerate(workload):
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=asked.max_tokens, ignore_eos=asked.ignore_eos
            )
            request = intake.request(intake.encode(asked.prompt), params)
            made.append(replace(request, arrival_s=0.0, salt=salt))
        return made

    def run(self, requests: Sequence[Request]) -> OfflineRun:
        """Run all requests, which are in the queue from the start."""
        journal = self.engine.loop.journal
        before = journal.totals()
        log = self._arrivals.run(self.engine.loop, requests)
        cost = scheduling_cost(before, journal.totals(), log.duration_s)
        return OfflineRun(log=log, token_ids=self._arrivals.token_ids(), scheduling=cost)

    def facts(self) -> EngineFacts:
        """Return the facts for a report."""
        return EngineFacts(
            model=self.engine.info.model_name,
            choices={name: choice.value for name, choice in self.engine.info.choices.items()},
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            block_size=self.config.cache.block_size,
            prefix_caching=self.config.cache.prefix_caching,
        )


def measure(
    bench: BenchEngine,
    systems: Mapping[str, System],
    workload: Workload,
    *,
    name: str,
    repeats: int,
    warmups: int,
    temperature: float,
    on_run: Callable[[str, OfflineRun], None],
) -> OfflineReport:
    """Run every system `warmups` + `repeats` times, in turn, so that a slow minute of the machine touches all alike.

    `on_run` hears of each run as it ends. Raises ConfigError for options out of range, RequestError for a workload
    that the model cannot take.
    """
    require(repeats >= 1, "repeats", repeats, "1 or more")
    require(warmups >= 0, "warmups", warmups, "0 or more")
    asked = workload.requests()
    runs: dict[str, list[OfflineRun]] = {system: [] for system in systems}
    for repeat in range(warmups + repeats):
        for system_name, system in systems.items():
            run = system(bench.requests(asked, temperature=temperature))
            on_run(system_name, run)
            if repeat >= warmups:
                runs[system_name].append(run)
    reference = next(iter(runs.values()))[0].token_ids
    return OfflineReport(
        name=name,
        engine=bench.facts(),
        workload=describe_workload(workload),
        temperature=temperature,
        warmups=warmups,
        repeats=repeats,
        systems=[_system_result(system, done, reference) for system, done in runs.items()],
    )


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
    vocab_size = bench.engine.spec.vocab_size

    def point(kind: str, tokens_per_step: int, shape: Fixed, rate: Callable[[OfflineRun], float]) -> LatencyPoint:
        """Run the same prompts each time, which no run finds in the cache."""
        asked = shape.requests()
        runs = [bench.run(bench.requests(asked, temperature=0.0)) for _ in range(warmups + repeats)][warmups:]
        rates = [rate(run) for run in runs]
        found = spread(rates)
        ms, cost = tokens_per_step / found.median * 1000, runs[rates.index(found.median)].scheduling
        assert cost is not None, "the engine has a scheduler"
        return LatencyPoint(kind=kind, tokens_per_step=tokens_per_step, tok_per_s=found, ms=ms, scheduling=cost)

    points: list[LatencyPoint] = []
    for length in prefill:
        shape = Fixed(num_requests=1, input_tokens=length, output_tokens=1, vocab_size=vocab_size)
        points.append(point("prefill", length, shape, lambda run, length=length: length / run.log.duration_s))
    for size in decode:
        tokens = {"input_tokens": prompt_tokens, "output_tokens": output_tokens + 1}
        shape = Fixed(num_requests=size, vocab_size=vocab_size, **tokens)
        points.append(point("decode", size, shape, _full_batch_rate))
    return LatencyReport(
        name=name, engine=bench.facts(), warmups=warmups, repeats=repeats, prompt_tokens=prompt_tokens, points=points
    )


def _full_batch_rate(run: OfflineRun) -> float:
    """Return output tokens per second while all sequences decode: from the last first token to the first end."""
    start_s = max(record.chunk_times_s[0] for record in run.log.records)
    end_s = min(record.end_s for record in run.log.records)
    if end_s <= start_s:
        raise ConfigError("the first sequence ended before the last one began to decode: ask for more output tokens")
    tokens = sum(start_s < time_s <= end_s for record in run.log.records for time_s in record.chunk_times_s)
    return tokens / (end_s - start_s)


def spread(rates: Sequence[float]) -> Spread:
    """Return median, minimum and maximum; of an even number the lower middle rate, so that it was measured."""
    ordered = sorted(rates)
    return Spread(median=ordered[(len(ordered) - 1) // 2], min=ordered[0], max=ordered[-1])


def _system_result(system: str, runs: Sequence[OfflineRun], reference: Sequence[Sequence[int]]) -> SystemResult:
    rates = [sum(map(len, run.token_ids)) / run.log.duration_s for run in runs]
    rate = spread(rates)
    median = runs[rates.index(rate.median)]
    return SystemResult(
        system=system,
        results=summarize(median.log),
        output_tok_per_s=rate,
        scheduling=median.scheduling,
        idle_slot_share=median.idle_slot_share,
        outputs_equal_to_first=sum(own == first for own, first in zip(median.token_ids, reference, strict=True)),
    )


def scheduling_cost(before: Totals, after: Totals, duration_s: float) -> SchedulingCost:
    """Subtract two readings of the journal's totals: whatever ran before, warm-up included, does not count."""
    plan_s, commit_s = after.plan_s - before.plan_s, after.commit_s - before.commit_s
    num_requests, num_steps = after.num_requests - before.num_requests, after.num_steps - before.num_steps
    return SchedulingCost(
        num_requests=num_requests,
        num_steps=num_steps,
        num_sampled_tokens=after.num_sampled_tokens - before.num_sampled_tokens,
        plan_s=plan_s,
        commit_s=commit_s,
        s_per_request=(plan_s + commit_s) / max(1, num_requests),
        s_per_step=(plan_s + commit_s) / max(1, num_steps),
        share_of_run=(plan_s + commit_s) / duration_s,
    )
