"""The metrics that /metrics shows: names with the stems that vLLM's dashboards and autoscalers know, in base units.

Counters move in the server, on the event loop; gauges are read from the engine when somebody asks. Each app has a
registry of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.core.step import DraftStats
from ridgeline.decoding.request import Request
from ridgeline.engine.client import EngineClient
from ridgeline.engine.outputs import Finish

PREFIX = "ridgeline"
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_NUMBERS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_REQUEST = {  # of each output that ended normally
    "time_to_first_token_seconds": ("Arrival to first token, per output.", _WAIT_S),
    "time_per_output_token_seconds": ("Mean time between an output's tokens.", _TOKEN_S),
    "e2e_request_latency_seconds": ("Arrival to last token, per output.", _REQUEST_S),
    "request_queue_time_seconds": ("Arrival to the first step, per output.", _WAIT_S),
    "request_prefill_time_seconds": ("First step to first token, per output.", _WAIT_S),
    "request_decode_time_seconds": ("First to last token, per output.", _REQUEST_S),
    "request_inference_time_seconds": ("First step to last token, per output.", _REQUEST_S),
    "request_prompt_tokens": ("Tokens of the prompt, per output.", _NUMBERS),
    "request_generation_tokens": ("Tokens of the output.", _NUMBERS),
    "request_params_max_tokens": ("Tokens that an output might have had.", _NUMBERS),
    "request_num_preemptions": ("How often an output was sent back to the queue for lack of blocks.", _NUMBERS),
}
_RENAMED_BY_VLLM = {"time_per_output_token_seconds": "request_time_per_output_token_seconds"}
_OUR_OWN = ("kv_blocks", "requests_", "engine_", "step_", "event_loop_", "queue_", "build_", "choice_")  # stems


class Metrics:
    """Counters and histograms that one app fills, and the engine's gauges beside them.

    `vllm_name` is the model's where they are shown under vLLM's names too.
    """

    def __init__(self, engine: EngineClient, vllm_name: str | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._vllm_name = vllm_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Those of them that the prefix cache served.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated and handed to the server.")
        self.successes = self._counter("request_success", "Outputs that ended normally, by reason.", "finished_reason")
        self.aborted = self._counter("requests_aborted", "Requests whose client went away before the end.")
        self.rejected = self._counter("requests_rejected", "Requests answered with an error, by its code.", "reason")
        self._of_requests = [self._histogram(name, *row) for name, row in _REQUEST.items()]
        self.itl = self._histogram("inter_token_latency_seconds", "Time between an output's deltas.", _TOKEN_S)
        self.loop_lag = self._histogram("event_loop_lag_seconds", "How late the server's event loop was.", _TOKEN_S)

    def show(self, stem: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when somebody asks."""
        Gauge(f"{PREFIX}_{stem}", text, registry=self._registry).set_function(read)

    def finished(self, request: Request, num_output: int, finish: Finish) -> None:
        """Count an output that ended normally."""
        timings = finish.timings
        queue_s, ttft_s, latency_s = timings.queue_s, timings.ttft_s, timings.latency_s
        parts_s = (None, None) if ttft_s is None else (ttft_s - queue_s, latency_s - ttft_s)
        values = [ttft_s, timings.tpot_s, latency_s, queue_s, *parts_s, latency_s - queue_s]
        values += [len(request.prompt_ids), num_output, request.max_tokens, timings.num_preemptions]
        self.successes.labels(finish.reason.value).inc()
        for histogram, value in zip(self._of_requests, values, strict=True):
            if value is not None:
                histogram.observe(value)

    def render(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self if self._vllm_name is not None else self._registry)  # pyright: ignore[reportArgumentType]

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that vLLM has too under both names."""
        for family in self._registry.collect():
            yield family
            stem = family.name.removeprefix(f"{PREFIX}_")
            if not stem.startswith(_OUR_OWN):
                alias = Metric(f"vllm:{_RENAMED_BY_VLLM.get(stem, stem)}", family.documentation, family.type)
                for each in family.samples:
                    labels = {"model_name": str(self._vllm_name), "engine": "0", **each.labels}
                    alias.add_sample(each.name.replace(family.name, alias.name, 1), labels, each.value)
                yield alias

    def _counter(self, stem: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{stem}", text, labels, registry=self._registry)

    def _histogram(self, stem: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{stem}", text, buckets=bounds, registry=self._registry)


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
        yield _gauge("engine_heartbeat_age_seconds", "Since the engine's process was heard of.", stats.silence_s)
        chosen = {name: choice.value for name, choice in self.engine.info().choices.items()}
        yield _facts("choice", "Settings that the engine chose itself.", *chosen.items())
        yield _facts("build", "What serves.", ("version", version("ridgeline")))
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


def _facts(stem: str, text: str, *facts: tuple[str, str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_{stem}_info", text, labels=("name", "value"))
    for fact in facts:
        family.add_metric(fact, 1)
    return family


def _gauge(stem: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{stem}", text, value=value)


def _total(stem: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{stem}", text, value=value)
