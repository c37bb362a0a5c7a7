"""Turns of two engines on the same prompts, and the figures that follow from them."""

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.speculation.turns import Timed, Turn, in_loops, in_slices

from ridgeline import SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.step import DraftStats

MIN_TOKENS = 8  # of an output in the mean of a batch, below which a pair says nothing of decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A median of ratios, on over off, with their range and the 95 % interval of the median (None: too few)."""

    median: float
    low: float
    high: float
    interval: tuple[float, float] | None
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One domain, batch, temperature and choice of drafts. Lists have one entry per pair."""

    domain: str
    batch: int
    temperature: float
    speculate: str
    speedup: Figure
    speedup_outside_loops: Figure | None
    of_totals: float  # tokens/s of all pairs together, on over off
    tokens_per_s: float  # with drafts
    share_in_loops: float
    same_tokens: float  # share of the outputs whose tokens are those without drafts
    mean_accepted_length: float  # tokens a verified draft gained, with the one that follows it; 1.0: none was drafted
    drafts: dict[str, object]  # what became of them, by proposer
    ratios: list[float]


@dataclass(frozen=True, slots=True)
class Pair:
    off: Turn
    on: Turn
    drafts: dict[str, DraftStats]  # of this pair


def run_pairs(
    configs: tuple[EngineConfig, EngineConfig],
    prompts: Sequence[list[int]],
    batch: int,
    temperature: float,
    options: argparse.Namespace,
) -> Iterator[Pair]:
    """Yield pairs over batches of the prompts, each of `batch` different ones or, where there are fewer, with other
    seeds; the engines are opened anew before the prompts come again. Where outputs end at once nothing is decoded:
    such a pair is left out."""
    number = tried = 0
    clock = time.thread_time if options.cpu_time else time.perf_counter
    while number < options.pairs and tried < 8 * options.pairs:
        engines = [Timed(config, clock, decoding_alone=options.cold) for config in configs]
        for start in range(0, max(len(prompts) - batch + 1, 1), batch):
            if number == options.pairs:
                return
            chosen = [prompts[(start + i) % len(prompts)] for i in range(batch)]
            one = [SamplingParams(temperature=0, max_tokens=1)] * batch
            params = [
                SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=seed)
                for seed in ([None] * batch if options.unseeded else range(tried * batch, (tried + 1) * batch))
            ]
            tried += 1
            before = engines[1].drafts()
            for engine in () if options.cold else engines:
                engine.run(chosen, one)  # the prompts are in the cache now
            order = 1 if number % 2 == 0 else -1
            off, on = in_slices(engines[::order], chosen, params)[::order]
            if sum(len(output.token_ids) - output.num_before for output in off.outputs) < MIN_TOKENS * batch:
                continue
            yield Pair(off, on, _since(before, engines[1].drafts()))
            number += 1


def _since(before: dict[str, DraftStats], after: dict[str, DraftStats]) -> dict[str, DraftStats]:
    """Subtract the counts of `before`."""
    return {name: _combined(now, before.get(name), -1) for name, now in after.items()}


def _combined(one: DraftStats, other: DraftStats | None, sign: int = 1) -> DraftStats:
    if other is None:
        return one
    longest = max(len(one.num_accepted_per_position), len(other.num_accepted_per_position))
    padded = [[*each.num_accepted_per_position, *[0] * longest][:longest] for each in (one, other)]
    return DraftStats(
        one.num_drafts + sign * other.num_drafts,
        one.num_draft_tokens + sign * other.num_draft_tokens,
        one.num_accepted_tokens + sign * other.num_accepted_tokens,
        tuple(a + sign * b for a, b in zip(*padded, strict=True)),
    )


def summarize(domain: str, batch: int, temperature: float, speculate: str, pairs: Sequence[Pair]) -> Cell:
    """Summarize the pairs of one cell."""
    drafts: dict[str, DraftStats] = {}
    for pair in pairs:
        drafts = {**drafts, **{name: _combined(each, drafts.get(name)) for name, each in pair.drafts.items()}}
    outside = [
        on / off
        for pair in pairs
        if (on := pair.on.rate_outside_loops) is not None and (off := pair.off.rate_outside_loops) is not None
    ]
    outputs = [(off, on) for pair in pairs for off, on in zip(pair.off.outputs, pair.on.outputs, strict=True)]
    loops = [in_loops(on.token_ids) for _, on in outputs]
    ratios = [pair.on.rate / pair.off.rate for pair in pairs]
    num_drafts = sum(each.num_drafts for each in drafts.values())
    accepted = sum(each.num_accepted_tokens for each in drafts.values())
    return Cell(
        domain=domain,
        batch=batch,
        temperature=temperature,
        speculate=speculate,
        speedup=_figure(ratios),
        speedup_outside_loops=_figure(outside) if outside else None,
        of_totals=_total_rate(pair.on for pair in pairs) / _total_rate(pair.off for pair in pairs),
        tokens_per_s=_total_rate(pair.on for pair in pairs),
        share_in_loops=sum(map(sum, loops)) / sum(map(len, loops)),
        same_tokens=statistics.mean(off.token_ids == on.token_ids for off, on in outputs),
        mean_accepted_length=1 + accepted / num_drafts if num_drafts else 1.0,
        drafts={name: each._asdict() for name, each in drafts.items()},
        ratios=ratios,
    )


def _total_rate(turns: Iterable[Turn]) -> float:
    turns = list(turns)
    return sum(turn.rate * turn.seconds for turn in turns) / sum(turn.seconds for turn in turns)


def _figure(ratios: Sequence[float]) -> Figure:
    """Summarize ratios. The interval is that of order statistics, free of any distribution."""
    ordered = sorted(ratios)
    n = len(ordered)
    tail, rank = 0.0, -1  # the largest rank below which lie less than 2.5 % of binomial(n, 1/2)
    while (tail := tail + math.comb(n, rank + 1) / 2**n) <= 0.025:
        rank += 1
    interval = None if rank < 0 else (ordered[rank], ordered[n - 1 - rank])
    return Figure(median=statistics.median(ordered), low=ordered[0], high=ordered[-1], interval=interval, pairs=n)
