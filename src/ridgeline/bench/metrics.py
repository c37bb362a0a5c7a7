"""Define what a run means, with vLLM's definitions (`vllm bench serve`), so that figures compare number for number.

TTFT   sending to the first chunk with tokens                 per successful request
TPOT   (E2EL − TTFT) / (output tokens − 1)                    per successful request of more than one token
ITL    time between neighbouring chunks                       every gap of every successful request, pooled
E2EL   sending to the last chunk                              per successful request
Throughputs divide the counts of successful requests by the duration of the whole run. Pure arithmetic, no I/O.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.core.slo import Slo, SloMetric

MAX_ERROR_KINDS = 10
COLUMNS = ("mean", "p50", "p90", "p99", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Statistics that tell a latency, in milliseconds.

    `std` is the population's; percentiles interpolate linearly, numpy's default.
    """

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float

    @property
    def mean_over_time(self) -> float:
        """The mean of values that follow each other, each counted by its length: what a random moment falls into."""
        return self.mean + self.std**2 / self.mean if self.mean else 0.0

    def cells(self) -> Sequence[str]:
        """Return the cells of a table with the columns COLUMNS."""
        return [f"{getattr(self, name):.2f}" for name in COLUMNS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """The four latencies of a set of requests; None where there is nothing to measure."""

    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Counts requests that met every objective. Attainments are shares of all requests sent: a failure meets none."""

    slos: tuple[Slo, ...]
    good_requests: int
    requests_per_s: float
    attainment: float
    attainment_by_metric: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The whole run. Token counts are of successful requests."""

    duration_s: float
    completed: int
    failed: int
    unsent: int  # the time limit came first
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    requests_without_usage: int  # their token counts are the client's own: chunks, and 0 for a prompt of text
    request_throughput_per_s: float
    output_throughput_tok_per_s: float
    total_throughput_tok_per_s: float
    peak_concurrency: int
    latencies: Latencies
    # Sent later than the load asked: waiting for a slot, or a client that is too slow.
    send_delay_ms: Distribution | None
    goodput: Goodput | None
    errors: dict[str, int]  # the most frequent failures and how often each came


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """The run without its ramp-up and its drain: from the first completion to the last sending.

    Before the first completion the server is still filling up; after the last sending it only empties. Requests count
    where they complete, prompt tokens where their request is sent, output tokens where their chunk arrives (a chunk
    carries an equal share of its request's tokens), latencies for the requests sent inside. What falls on a boundary
    counts on one side only: sendings in [start, end), completions and chunks in (start, end]. SGLang's window of the
    same name keeps the longest interval near peak concurrency instead, which under random arrivals selects the busiest
    stretch rather than the typical one.
    """

    start_s: float
    end_s: float
    completed: int
    mean_concurrency: float
    request_throughput_per_s: float
    prompt_throughput_tok_per_s: float
    output_throughput_tok_per_s: float
    latencies: Latencies


def summarize(log: RunLog, slos: Sequence[Slo] = ()) -> Results:
    """Return all figures of a run."""
    good = [record for record in log.records if record.error is None]
    errors = Counter(record.error for record in log.records if record.error is not None)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    # A request that ends as another is sent does not overlap with it: ends sort before sendings.
    steps = sorted([(record.sent_s, 1) for record in log.records] + [(record.end_s, -1) for record in log.records])
    return Results(
        duration_s=log.duration_s,
        completed=len(good),
        failed=len(log.records) - len(good),
        unsent=log.unsent,
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=sum(record.cached_tokens for record in good),
        output_tokens=output_tokens,
        requests_without_usage=sum(not record.usage_reported for record in good),
        request_throughput_per_s=_per_s(len(good), log.duration_s),
        output_throughput_tok_per_s=_per_s(output_tokens, log.duration_s),
        total_throughput_tok_per_s=_per_s(prompt_tokens + output_tokens, log.duration_s),
        peak_concurrency=int(np.cumsum([step for _, step in steps]).max(initial=0)),
        latencies=_latencies(good),
        send_delay_ms=_distribution_ms([record.sent_s - record.arrival_s for record in log.records]),
        goodput=_goodput(log, slos) if slos else None,
        errors=dict(errors.most_common(MAX_ERROR_KINDS)),
    )


def within_ms(log: RunLog, metric: SloMetric, share: float) -> float:
    """Return what `share` of all requests that were sent stay within; infinite where fewer succeeded."""
    values_s = sorted(_seconds(record, metric) for record in log.records)
    return 1000 * values_s[math.ceil(share * len(values_s)) - 1]


def steady_state(log: RunLog) -> SteadyState | None:
    """Return the figures inside the steady window; None where sending ended before anything completed (a burst)."""
    good = [record for record in log.records if record.error is None]
    if not good:
        return None
    start_s = min(record.end_s for record in good)
    end_s = max(record.sent_s for record in log.records)
    span_s = end_s - start_s
    if span_s <= 0:
        return None
    sent_inside = [record for record in good if start_s <= record.sent_s < end_s]
    completed = sum(start_s < record.end_s <= end_s for record in good)
    shares = [fmean(start_s < time_s <= end_s for time_s in record.chunk_times_s) for record in good]
    output_tokens = sum(record.output_tokens * share for record, share in zip(good, shares))
    busy_s = sum(max(0.0, min(record.end_s, end_s) - max(record.sent_s, start_s)) for record in log.records)
    return SteadyState(
        start_s=start_s,
        end_s=end_s,
        completed=completed,
        mean_concurrency=busy_s / span_s,
        request_throughput_per_s=completed / span_s,
        prompt_throughput_tok_per_s=sum(record.prompt_tokens for record in sent_inside) / span_s,
        output_throughput_tok_per_s=output_tokens / span_s,
        latencies=_latencies(sent_inside),
    )


def _goodput(log: RunLog, slos: Sequence[Slo]) -> Goodput:
    met = [[1000 * _seconds(record, slo.metric) <= slo.limit_ms for slo in slos] for record in log.records]
    good = sum(all(each) for each in met)
    sent = max(1, len(log.records))
    return Goodput(
        slos=tuple(slos),
        good_requests=good,
        requests_per_s=_per_s(good, log.duration_s),
        attainment=good / sent,
        attainment_by_metric={slo.metric: sum(each[i] for each in met) / sent for i, slo in enumerate(slos)},
    )


def _seconds(record: RequestRecord, metric: SloMetric) -> float:
    """Return what an objective is about; infinite for a request that failed."""
    if record.error is not None:
        return math.inf
    return {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}[metric]


def _latencies(good: Sequence[RequestRecord]) -> Latencies:
    return Latencies(
        ttft_ms=_distribution_ms([record.ttft_s for record in good]),
        tpot_ms=_distribution_ms([record.tpot_s for record in good if record.tpot_s is not None]),
        itl_ms=_distribution_ms([gap_s for record in good for gap_s in record.gaps_s]),
        e2el_ms=_distribution_ms([record.e2el_s for record in good]),
    )


def _distribution_ms(values_s: Sequence[float]) -> Distribution | None:
    if not values_s:
        return None
    values_ms = np.asarray(values_s, dtype=np.float64) * 1000
    mean, std = float(values_ms.mean()), float(values_ms.std())
    p50, p90, p99, most = np.percentile(values_ms, (50, 90, 99, 100)).tolist()
    return Distribution(count=len(values_s), mean=mean, std=std, p50=p50, p90=p90, p99=p99, max=most)


def _per_s(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
