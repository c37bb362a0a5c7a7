"""The metrics that /metrics shows: names with the stems that vLLM's dashboards and autoscalers know, in base units.

Counters move in the server, on the event loop; gauges are read from the engine when somebody asks. Each app has a
registry of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.core.step import DraftStats
from ridgeline.engine.client import EngineClient
from ridgeline.engine.request import Timings

PREFIX = "ridgeline"
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters and histograms that one app fills, and the engine's gauges beside them."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated and handed to the server.")
        self.successes = self._counter("request_success", "Outputs that ended normally, by reason.", "finished_reason")
        self.aborted = self._counter("requests_aborted", "Requests whose client went away before the end.")
        self.rejected = self._counter("requests_rejected", "Requests answered with an error, by its code.", "reason")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token, per output.", _TTFT_S)
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean time between an output's tokens.", _TPOT_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token, per output.", _E2E_S)

    def finished(self, reason: str, timings: Timings) -> None:
        """Count an output that ended normally."""
        self.successes.labels(reason).inc()
        self._e2e.observe(timings.latency_s)
        if timings.ttft_s is not None:
            self._ttft.observe(timings.ttft_s)
        if timings.tpot_s is not None:
            self._tpot.observe(timings.tpot_s)

    def render(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, stem: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{stem}", text, labels, registry=self._registry)

    def _histogram(self, stem: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{stem}", text, buckets=buckets, registry=self._registry)


@dataclass(frozen=True, slots=True)
class _EngineCollector(Collector):
    """Reads the engine's own numbers at the time of the scrape."""

    engine: EngineClient

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        cache = stats.cache
        usage = max((group.used / group.total for group in cache.groups), default=0.0)
        yield _gauge("num_requests_running", "Sequences that hold cache blocks.", stats.num_running)
        yield _gauge("num_requests_waiting", "Sequences in the queue.", stats.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of cache blocks in use; 1 is all of them.", usage)
        blocks = GaugeMetricFamily(f"{PREFIX}_kv_blocks", "Cache blocks by state.", labels=("group", "state"))
        for index, group in enumerate(cache.groups):
            for state, count in (("free", group.free), ("cached", group.cached), ("used", group.used)):
                blocks.add_metric((str(index), state), count)
        yield blocks
        yield _total("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.prefix_query_tokens)
        yield _total("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cache.prefix_hit_tokens)
        yield _total("num_preemptions", "Sequences sent back to the queue for lack of blocks.", stats.num_preemptions)
        yield _total("engine_restarts", "Engine processes started after another one died.", stats.num_restarts)
        yield _total("engine_tokens_computed", "Tokens that steps have computed.", stats.num_computed_tokens)
        if (drafts := stats.drafts) is not None:
            yield from _drafts(drafts)
        text = "Time of engine steps: plan, run, commit and render."
        yield SummaryMetricFamily(f"{PREFIX}_step_duration_seconds", text, stats.num_steps, stats.step_s)


def _drafts(drafts: Mapping[str, DraftStats]) -> Iterator[Metric]:
    def family(stem: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"{PREFIX}_spec_decode_{stem}", text, labels=("method", *labels))

    verified = family("num_drafts", "Drafts that were verified.")
    tokens = family("num_draft_tokens", "Tokens of verified drafts.")
    accepted = family("num_accepted_tokens", "Drafted tokens that were accepted.")
    of_position = "Accepted tokens by their position in the draft."
    by_position = family("num_accepted_tokens_per_pos", of_position, "position")
    for method, stats in drafts.items():
        verified.add_metric((method,), stats.num_drafts)
        tokens.add_metric((method,), stats.num_draft_tokens)
        accepted.add_metric((method,), stats.num_accepted_tokens)
        for position, count in enumerate(stats.num_accepted_per_position):
            by_position.add_metric((method, str(position)), count)
    yield from (verified, tokens, accepted, by_position)


def _gauge(stem: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{stem}", text, value=value)


def _total(stem: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{stem}", text, value=value)
