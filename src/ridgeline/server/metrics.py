"""Show the metrics of `metrics.toml` at /metrics, and those that vLLM has under its names too, if that is asked for.

Counters move in the server, on the event loop; what the engine tells is read when somebody asks. Each app has a
registry of its own. What is not known is not shown.
"""

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.core.host import huge_page_bytes
from ridgeline.core.slo import Slo
from ridgeline.decoding.request import Request
from ridgeline.engine.client import EngineClient
from ridgeline.engine.journal import WAIT_REASONS
from ridgeline.engine.outputs import Finish
from ridgeline.server.metric_names import BUCKETS, METRICS, PREFIX
from ridgeline.server.step_counts import Distribution, Drift, StepCounts

if TYPE_CHECKING:
    from ridgeline.server.service import RequestNote

STAGES = ("body", "waiting", "output", "unread")
FINDINGS_S = 3600.0
MEMORY_PERIOD_S = 60.0

_OF_OUTPUTS = (  # histograms of each output that ended normally
    *("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_prefill_kv_computed_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "request_params_n", "request_num_preemptions"),
)


class Metrics:
    """Counters and histograms that one app fills, and what the engine tells beside them.

    `vllm_name` is the model's where they are shown under vLLM's names too.
    """

    def __init__(self, engine: EngineClient, vllm_name: str | None = None, slos: Sequence[Slo] = ()) -> None:
        self._registry = CollectorRegistry()
        self._slos = slos
        self._engine = _EngineCollector(engine, has_plan=len(slos) > 0)
        self._registry.register(self._engine)
        ProcessCollector(registry=self._registry)
        ProcessCollector("ridgeline_engine", lambda: engine.process_id or "none", registry=self._registry)
        self._vllm_name = vllm_name
        self.prompt_tokens = self._counter("prompt_tokens")
        self.cached_tokens = self._counter("prompt_tokens_cached")
        self.generation_tokens = self._counter("generation_tokens")
        self.successes = self._counter("request_success")
        self._aborted = self._counter("requests_aborted")
        for stage in STAGES:  # a rate needs what was before the first
            self._aborted.labels(stage)
        if slos:
            self._met, self._good = self._counter("request_slo"), self._counter("goodput_requests")
        for slo, met in product(slos, ("true", "false")):
            self._met.labels(slo.metric, met)
        self.rejected = self._counter("requests_rejected")
        self.itl = self._histogram("inter_token_latency_seconds")
        self._responses = self._counter("http_responses")
        self._overhead = self._histogram("http_overhead_seconds")
        self._loop_lag = self._histogram("event_loop_lag_seconds")
        self._of_outputs = [self._histogram(name) for name in _OF_OUTPUTS]

    def show(self, name: str, read: Callable[[], float]) -> None:
        """Show a gauge that is read when somebody asks."""
        Gauge(PREFIX + name, METRICS[name].text, registry=self._registry).set_function(read)

    def tick(self, lag_s: float) -> None:
        """Count how late the event loop is, and take in what the engine did; ten times a second."""
        self._loop_lag.observe(lag_s)
        self._engine.tick(lag_s)

    def ended(self, note: "RequestNote", seconds: float, *, has_slo: bool) -> None:
        """Count an HTTP request, and whether it met objectives, if it `has_slo`; what failed met none."""
        if note.status:  # else the server is ending
            self._responses.labels(str(note.status)).inc()
        if note.worst_s:
            self._overhead.observe(max(0.0, seconds - note.worst_s["e2el"]))
        if has_slo and self._slos and (note.failed or note.worst_s):
            met = [not note.failed and note.worst_s[slo.metric] * 1000 <= slo.limit_ms for slo in self._slos]
            for slo, is_met in zip(self._slos, met):
                self._met.labels(slo.metric, str(is_met).lower()).inc()
            self._good.inc(all(met))

    def left(self, note: "RequestNote", *, unread: bool) -> None:
        """Count a request whose client went away, by how far it was; `unread`: it had stopped to read."""
        tokens = "output" if note.completion_tokens else "waiting" if note.slots else "body"
        self._aborted.labels("unread" if unread else tokens).inc()

    def diagnosed(self, findings: Sequence[Mapping[str, Any]]) -> None:
        """Show what the doctor found just now, for FINDINGS_S."""
        self._engine.diagnosed(findings)

    def look_at_memory(self) -> None:
        """Find out how much is in huge pages, if that is a minute ago; it may take a while, in one thread at a time."""
        self._engine.look_at_memory()

    def finished(self, request: Request, num_output: int, finish: Finish) -> None:
        """Count an output that ended normally."""
        timings, num_prompt = finish.timings, len(request.prompt_ids)
        queue_s, ttft_s, latency_s = timings.queue_s, timings.ttft_s, timings.latency_s
        parts_s = (None, None) if ttft_s is None else (ttft_s - queue_s, latency_s - ttft_s)
        values = [ttft_s, timings.tpot_s, latency_s, queue_s, *parts_s, latency_s - queue_s]
        values += [num_prompt, num_prompt - finish.num_cached_tokens, num_output, request.max_tokens]
        values += [request.params.n, timings.num_preemptions]
        self.successes.labels(finish.reason.value).inc()
        for histogram, value in zip(self._of_outputs, values, strict=True):
            if value is not None:
                histogram.observe(value)

    def render(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self if self._vllm_name is not None else self._registry)  # pyright: ignore[reportArgumentType]

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that vLLM has too under both names."""
        for family in self._registry.collect():
            yield family
            known = METRICS.get(family.name.removeprefix(PREFIX))
            if known is not None and known.vllm:
                alias = Metric(f"vllm:{known.vllm}", family.documentation, family.type)
                for each in family.samples:
                    labels = {"model_name": str(self._vllm_name), "engine": "0", **each.labels}
                    alias.add_sample(each.name.replace(family.name, alias.name, 1), labels, each.value)
                yield alias

    def _counter(self, name: str) -> Counter:
        return Counter(PREFIX + name, METRICS[name].text, METRICS[name].labels, registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        known = METRICS[name]
        return Histogram(PREFIX + name, known.text, buckets=BUCKETS[known.buckets], registry=self._registry)


class _EngineCollector(Collector):
    """Reads what the engine tells at the time of the scrape: by its name here, and what `read` says follows."""

    def __init__(self, engine: EngineClient, *, has_plan: bool) -> None:
        self._engine, self.info, self.counts = engine, engine.info(), StepCounts()
        self.stats = engine.stats()
        self.drift = Drift() if has_plan else None
        self.huge_page_bytes: int | None = None
        self._looked_s = self._diagnosed_s = -math.inf
        self._lag_s = 0.0
        self._findings: Mapping[str, Mapping[str, float]] = {}
        self.build = {version("ridgeline"): {platform.python_version(): {Path(self.info.model_path).name: 1}}}
        self.choices = {name: {choice.value: 1} for name, choice in self.info.choices.items()}

    @property
    def cache_config(self) -> Mapping[int, Mapping[int, int]]:
        """The size and the number of the first group's blocks."""
        return {self._engine.journal.block_size: {group.total: 1 for group in self.stats.cache.groups[:1]}}

    @property
    def kv_usage(self) -> float:
        """The share in use of the group that has the fewest blocks left."""
        return max((group.used / group.total for group in self.stats.cache.groups), default=0.0)

    @property
    def kv_blocks(self) -> Mapping[int, Mapping[str, int]]:
        """Blocks by group and state."""
        groups = enumerate(self.stats.cache.groups)
        return {index: {"free": group.free, "cached": group.cached, "used": group.used} for index, group in groups}

    @property
    def waiting(self) -> Mapping[str, int]:
        """Sequences in the queue: what its head waits for, and those behind it; `step`: none was planned since."""
        num, head = self.stats.num_waiting, self.counts.head_waits or "step"
        return {**dict.fromkeys((*WAIT_REASONS[1:], "step"), 0), head: min(1, num), "behind": max(0, num - 1)}

    @property
    def lora(self) -> Mapping[int, Mapping[str, Mapping[str, float]]]:
        """Names of the adapters that requests run with, and that some wait for; the value is the time, as in vLLM."""
        running, opened = self.stats.running_adapters, self.stats.open_adapters
        numbers = self.info.adapters.items()
        runs = ",".join(name for name, number in numbers if number in running)
        waits = ",".join(name for name, number in numbers if opened.get(number, 0) > running.get(number, 0))
        most = self.info.max_loras or len(numbers)
        return {most: {runs: {waits: time.time()}}} if most else {}

    @property
    def findings(self) -> Mapping[str, Mapping[str, float]]:
        """Gains by the doctor's finding and its severity, while they are new."""
        return self._findings if time.monotonic() < self._diagnosed_s + FINDINGS_S else {}

    def diagnosed(self, findings: Sequence[Mapping[str, Any]]) -> None:
        """Take in findings."""
        self._findings = {each["id"]: {each["severity"]: each["gain"]} for each in findings}
        self._diagnosed_s = time.monotonic()

    def look_at_memory(self) -> None:
        """Look once a minute."""
        if (now_s := time.monotonic()) >= self._looked_s + MEMORY_PERIOD_S:
            self._looked_s, self.huge_page_bytes = now_s, huge_page_bytes(self._engine.process_id)

    def tick(self, lag_s: float) -> None:
        """Write beside the engine's records how late the event loop was, and follow these."""
        self._lag_s += lag_s
        self._engine.journal.around.append(time.monotonic(), self._lag_s, math.nan, math.nan)
        self.follow()

    def follow(self) -> None:
        """Take in the records of the engine's steps before they are written over, and how the plan holds."""
        self.counts.follow(self._engine.journal)
        if self.drift is not None and self.drift.is_due(now_s := time.monotonic()):
            self.drift.follow(now_s, self._engine.stats().priced)

    def collect(self) -> Iterator[Metric]:
        self.stats = self._engine.stats()
        self.follow()
        for name, metric in METRICS.items():
            value = reduce(_part, metric.read.split("."), self) if metric.read else None
            if isinstance(value, Distribution):
                yield HistogramMetricFamily(PREFIX + name, metric.text, value.buckets(), value.sum)
            elif samples := list(_samples(value)):
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(PREFIX + name, metric.text, labels=metric.labels)
                for labels, number in samples:
                    family.add_metric(labels, number)
                yield family


def _part(value: Any, name: str) -> Any:
    """Return a part of a value, or of each value of a mapping; None where it is not known."""
    if isinstance(value, Mapping):
        return {key: getattr(each, name) for key, each in value.items()}
    return None if value is None else getattr(value, name)


def _samples(value: Any, *labels: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers that a value holds, by their keys and places."""
    if isinstance(value, Mapping | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _samples(each, *labels, str(key))
    elif value is not None and not math.isnan(value):
        yield labels, value
