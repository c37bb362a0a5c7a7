"""Dissect a speed-up: the same requests through systems in which some techniques are off, and what each one is worth.

Three numbers, which differ where techniques help each other. Sequential: behind all before it in the order. Marginal:
what the whole system loses without it, and without what needs it. Shapley: its mean worth over all orders in which each
comes behind what it needs. All are factors of throughput; those of the first and of the last multiply to the whole.

Called by the command line.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, combinations
from typing import Any

from ridgeline.bench.metrics import Latencies, summarize
from ridgeline.bench.offline import BenchEngine, spread
from ridgeline.bench.offline_report import Spread
from ridgeline.bench.report import Report
from ridgeline.bench.workload import BenchRequest, Workload, require
from ridgeline.bench.workloads import WorkloadFacts, describe_workload
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError

Stack = frozenset[str]  # techniques that are on

NEEDS: Mapping[str, str | None] = {  # in the order in which they are added, each with the one that it needs
    "native": None,
    "kv_cache": None,
    "batching": "kv_cache",
    "continuous": "batching",
    "chunked": "continuous",
    "prefix": "kv_cache",
    "int8": None,
    "int4": None,
    "speculation": "kv_cache",
}
WORDS = {
    "native": "native kernels, not the reference backend",
    "kv_cache": "KV cache, not the whole text again for each token",
    "batching": "static batches, not one request at a time",
    "continuous": "continuous batching, not a batch until its longest has ended",
    "chunked": "chunked prefill, not whole prompts",
    "prefix": "prefix cache",
    "int8": "weights in int8, not as they are stored",
    "int4": "weights in int4, not as they are stored",
    "speculation": "speculation by lookup in the text",
}
WHOLE_PROMPTS = 1 << 13  # tokens of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds what one system did: techniques that are on, and output tokens per second over its runs."""

    techniques: list[str]
    output_tok_per_s: Spread
    latencies: Latencies | None  # None: not all requests are there from the start
    outputs_equal_to_first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Holds the worth of one technique, as factors of throughput; `shapley` is None where not all was measured."""

    technique: str
    words: str
    sequential: Spread
    marginal: float
    shapley: float | None
    is_lossy: bool  # outputs are not those without it


@dataclass(frozen=True, slots=True, kw_only=True)
class AblateReport(Report):
    """Systems on one workload, in turn; `total` is the whole beside nothing."""

    model: str
    workload: WorkloadFacts
    repeats: int
    num_requests: int
    total: Spread
    contributions: list[Contribution]
    systems: list[Measured] = field(default_factory=list[Measured])


def ablate(
    config: EngineConfig,
    workload: Workload,
    techniques: Sequence[str],
    *,
    name: str,
    repeats: int,
    all_subsets: bool,
    on_run: Callable[[Stack, float], None],
) -> AblateReport:
    """Measure each system `repeats` times, in turn; `all_subsets`, not only those of the order and those without one.

    Raises ConfigError for techniques that are unknown or need one that is left out, RequestError for a workload that
    the model cannot take.
    """
    require(repeats >= 1, "repeats", repeats, "1 or more")
    order = _ordered(techniques)
    sequence = [frozenset(order[:count]) for count in range(len(order) + 1)]
    without = {each: _closed_without(sequence[-1], each) for each in order}
    stacks = list(dict.fromkeys([*sequence, *without.values(), *(_feasible(order) if all_subsets else ())]))
    asked = workload.requests()
    rates: dict[Stack, list[float]] = {stack: [] for stack in stacks}
    latencies: dict[Stack, Latencies | None] = {}
    outputs: dict[Stack, list[list[int]]] = {}
    for stack in (stack for _ in range(repeats) for stack in stacks):
        rate, latencies[stack], outputs[stack] = _System(config, order, stack).run(asked)
        rates[stack].append(rate)
        on_run(stack, rate)
    median = {stack: spread(each).median for stack, each in rates.items()}
    worths = _shapley(order, median) if all_subsets else {}
    contributions = [
        Contribution(
            technique=each,
            words=WORDS[each],
            sequential=_ratio(rates[after], rates[before]),
            marginal=median[sequence[-1]] / median[without[each]],
            shapley=worths.get(each),
            is_lossy=outputs[after] != outputs[before],
        )
        for each, before, after in zip(order, sequence, sequence[1:])
    ]
    systems = [
        Measured(
            techniques=[each for each in order if each in stack],
            output_tok_per_s=spread(rates[stack]),
            latencies=latencies[stack],
            outputs_equal_to_first=sum(map(list.__eq__, outputs[stack], outputs[sequence[0]])),
        )
        for stack in stacks
    ]
    return AblateReport(
        name=name,
        model=config.model.model,
        workload=describe_workload(workload),
        repeats=repeats,
        num_requests=len(asked),
        total=_ratio(rates[sequence[-1]], rates[sequence[0]]),
        contributions=contributions,
        systems=systems,
    )


def _ordered(techniques: Sequence[str]) -> list[str]:
    if unknown := [each for each in techniques or ("",) if each not in NEEDS]:
        raise ConfigError(f"techniques are {', '.join(NEEDS)}; got {unknown[0][:40]!r}")
    for each in techniques:
        if (needed := NEEDS[each]) is not None and needed not in techniques:
            raise ConfigError(f"{each} needs {needed}: name both")
    if {"int8", "int4"} <= {*techniques}:
        raise ConfigError("weights are in int8 or in int4: name one")
    return [each for each in NEEDS if each in techniques]


def _closed_without(stack: Stack, technique: str) -> Stack:
    """Return a stack without a technique and all that need it."""
    left, size = stack - {technique}, -1
    while size != len(left):
        size = len(left)
        left = frozenset(each for each in left if (needed := NEEDS[each]) is None or needed in left)
    return left


def _feasible(order: Sequence[str]) -> Iterator[Stack]:
    subsets = chain.from_iterable(combinations(order, size) for size in range(len(order) + 1))
    return (stack for stack in map(frozenset, subsets) if all(NEEDS[each] in (None, *stack) for each in stack))


def _ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Return the ratios of runs of one turn, as they see the same machine."""
    return spread([one / other for one, other in zip(over, under, strict=True)])


def _shapley(order: Sequence[str], value: Mapping[Stack, float]) -> Mapping[str, float]:
    """Return each technique's mean factor over all orders in which it comes behind what it needs."""
    whole = frozenset(order)

    def next_of(stack: Stack) -> list[str]:
        return [each for each in order if each not in stack and NEEDS[each] in (None, *stack)]

    @cache
    def ways_to(stack: Stack) -> int:
        before = [stack - {each} for each in stack if _closed_without(stack, each) == stack - {each}]
        return sum(map(ways_to, before)) if stack else 1

    @cache
    def ways_on(stack: Stack) -> int:
        return sum(ways_on(stack | {each}) for each in next_of(stack)) if stack != whole else 1

    worth = dict.fromkeys(order, 0.0)
    for stack in value:
        for each in next_of(stack):
            share = ways_to(stack) * ways_on(stack | {each}) / ways_on(frozenset())
            worth[each] += share * math.log(value[stack | {each}] / value[stack])
    return {each: math.exp(log) for each, log in worth.items()}


@dataclass(frozen=True, slots=True)
class _System:
    """An engine in which those of `techniques` are off that are not on; others are as `config` says."""

    config: EngineConfig
    techniques: Sequence[str]
    on: Stack

    def run(self, asked: Sequence[BenchRequest]) -> tuple[float, Latencies | None, list[list[int]]]:
        """Return tokens per second, latencies where all requests are there from the start, and all tokens."""
        bench = BenchEngine(self._configured())
        bench.run(bench.requests(asked[:1], temperature=0.0))  # what only a first run takes
        size = 1 if self._lacks("batching") else bench.config.scheduler.max_num_seqs
        size = size if self._lacks("continuous") else len(asked)
        requests, start_s = bench.requests(asked, temperature=0.0), time.monotonic()
        if self._lacks("kv_cache"):
            token_ids, logs = [_without_cache(bench, request) for request in asked], []
        else:
            runs = [bench.run(requests[first : first + size]) for first in range(0, len(requests), size)]
            token_ids, logs = [ids for run in runs for ids in run.token_ids], [run.log for run in runs]
        rate = sum(map(len, token_ids)) / (time.monotonic() - start_s)
        return rate, summarize(logs[0], ()).latencies if len(logs) == 1 else None, token_ids

    def _lacks(self, technique: str) -> bool:
        return technique in self.techniques and technique not in self.on

    def _configured(self) -> EngineConfig:
        config, changed = self.config, dict[str, Any]()
        if self._lacks("chunked"):  # a prompt is one chunk, whoever waits
            most = max(config.scheduler.max_num_batched_tokens, WHOLE_PROMPTS)
            changed["scheduler"] = replace(config.scheduler, max_num_batched_tokens=most)
        if "prefix" in self.techniques:
            changed["cache"] = replace(config.cache, prefix_caching="prefix" in self.on)
        if {"int8", "int4"} & {*self.techniques}:
            scheme = next((name for name in ("int8", "int4") if name in self.on), None)
            changed["quantize"] = replace(config.quantize, scheme=scheme)
        if "speculation" in self.techniques:
            speculate = "ngram" if "speculation" in self.on else "off"
            changed["speculation"] = replace(config.speculation, speculate=speculate)
        if self._lacks("native"):
            changed["backend"] = replace(config.backend, backend="reference")
        return replace(config, **changed)


def _without_cache(bench: BenchEngine, request: BenchRequest) -> list[int]:
    """Return the greedy tokens of a request, each computed from the whole text before it."""
    prompt, made = bench.engine.intake.encode(request.prompt), list[int]()
    for _ in range(request.max_tokens):
        one = replace(request, prompt=[*prompt, *made], max_tokens=1)
        run = bench.run(bench.requests([one], temperature=0.0))
        made += run.token_ids[0]
        if run.log.records[0].finish_reason == "stop":
            break
    return made
