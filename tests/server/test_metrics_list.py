"""The list of metrics against a live server: everything on it is there, agrees with what clients counted, and what is
made of it is up to date.
"""

import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from live_server import PATIENCE_S, LiveServer, eventually, gated_serving, serving
from prometheus_client.parser import text_string_to_metric_families

from ridgeline import SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.cost.efficiency import Rest
from ridgeline.engine import priced
from ridgeline.engine.journal import CAPACITIES, WAIT_REASONS, Journal, timed_steps
from ridgeline.engine.llm import LLM
from ridgeline.engine.process.client import ProcessEngine
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.server import step_counts
from ridgeline.server.metric_names import BUCKETS, METRICS
from ridgeline.server.step_counts import Distribution, StepCounts

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))
import metrics_pages  # noqa: E402

CONFIG = EngineConfig.of("python-1m", num_threads=1, max_model_len=512, max_num_seqs=2)
PROCESS = {"cpu_seconds", "resident_memory_bytes", "virtual_memory_bytes", "start_time_seconds", "open_fds", "max_fds"}
# https://docs.vllm.ai/en/stable/usage/metrics/
VLLM = {
    *(
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "cache_config_info",
    ),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_cached"),
    *("generation_tokens", "request_success", "iteration_tokens_total", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_prefill_kv_computed_tokens", "request_params_n", "request_params_max_tokens"),
    *("request_num_preemptions", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
    *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos", "lora_requests_info"),
}


@dataclass(frozen=True)
class Scrape:
    """What /metrics shows, by prometheus_client's own parser."""

    families: dict
    values: dict

    @classmethod
    def of(cls, live: LiveServer) -> "Scrape":
        families = {family.name: family for family in text_string_to_metric_families(live.client.get("/metrics").text)}
        samples = (sample for family in families.values() for sample in family.samples)
        values = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}
        return cls({name: each for name, each in families.items() if not name.endswith("_created")}, values)

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[f"ridgeline_{name}", *sorted(labels.items())]


@dataclass(frozen=True)
class Asked:
    """What clients sent, and saw."""

    live: LiveServer
    usages: list
    num_computed: int
    statuses: Counter
    errors: Counter


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Iterator[Asked]:
    """Requests of all kinds, one after the other and at once; greedy, so that each is as long as was asked for."""
    with serving(ProcessEngine(CONFIG)) as live:
        usages, statuses, errors = [], Counter(), Counter()
        long = "def f(x):\n    return x + 1\n" * 8
        same = {"temperature": 0, "ignore_eos": True}
        bodies = [{"prompt": long, "max_tokens": 5}, {"prompt": long, "max_tokens": 7}]
        bodies += [{"prompt": ["import os", "class A:"], "max_tokens": 3, "n": 2}]
        for body in bodies:
            usages.append((body, live.complete(**same, **body)["usage"]))
        with ThreadPoolExecutor(8) as pool:
            at_once = [{"prompt": f"x{i} = ", "max_tokens": 20} for i in range(8)]
            usages += zip(at_once, pool.map(lambda body: live.complete(**same, **body)["usage"], at_once))
        body = {"prompt": "a = [", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, done = live.post("completions", **same, **body).text.strip().split("\n\n")
        assert done == "data: [DONE]"
        usages.append((body, json.loads(last.removeprefix("data: "))["usage"]))
        statuses[200] += len(usages)
        for body, code in (
            ({"prompt": "x", "temperature": -1}, None),
            ({"prompt": [1] * 600}, "context_length_exceeded"),
        ):
            refused = live.post("completions", **body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
            errors[code or "invalid_request_error"] += 1
        assert live.client.get("/nope").status_code == 404
        assert live.client.put("/v1/models").status_code == 405
        errors.update(not_found=1, method_not_allowed=1)
        statuses.update({400: 2, 404: 1, 405: 1})
        computed = sum(
            usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] + usage["completion_tokens"]
            - (len(body["prompt"]) if isinstance(body["prompt"], list) else 1) * body.get("n", 1)
            for body, usage in usages
        )  # fmt: skip
        eventually(lambda: live.metric("ridgeline_step_tokens_sum") == computed)
        yield Asked(live, usages, computed, statuses, errors)


def test_counts_are_exactly_what_clients_sent_and_saw(asked: Asked) -> None:
    scrape, usages = Scrape.of(asked.live), [usage for _, usage in asked.usages]
    prompt, output = (sum(usage[f"{of}_tokens"] for usage in usages) for of in ("prompt", "completion"))
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    outputs = sum((len(b["prompt"]) if isinstance(b["prompt"], list) else 1) * b.get("n", 1) for b, _ in asked.usages)
    assert cached >= 32 and outputs == len(usages) + 3
    assert scrape("prompt_tokens_total") == scrape("prefix_cache_queries_total") == prompt
    assert scrape("prompt_tokens_cached_total") == scrape("prefix_cache_hits_total") == cached
    assert scrape("generation_tokens_total") == scrape("request_generation_tokens_sum") == output
    assert scrape("request_success_total", finished_reason="length") == outputs
    assert scrape("inter_token_latency_seconds_count") == output - outputs
    assert asked.live.metric("ridgeline_requests_aborted_total") == scrape("journal_records_lost_total") == 0
    found = {dict(labels)["reason"]: value for (name, *labels), value in scrape.values.items()
             if name == "ridgeline_requests_rejected_total"}  # fmt: skip
    assert found == asked.errors
    for status, count in asked.statuses.items():
        looks = scrape("http_responses_total", status=str(status)) - count
        assert looks >= 1 if status == 200 else looks == 0  # /metrics was asked for as well
    assert scrape("http_overhead_seconds_count") == len(usages)
    assert scrape("request_params_n_sum") == len(usages) - 1 + 4 * 2
    assert scrape("queue_tokens") == scrape("open_outputs") == scrape("num_requests_running") == 0


def test_histograms_agree_with_each_other_and_with_the_totals(asked: Asked) -> None:
    scrape = Scrape.of(asked.live)
    for name, metric in METRICS.items():
        if metric.kind == "histogram":
            samples = scrape.families[f"ridgeline_{name}"].samples
            counts = [sample.value for sample in samples if sample.name.endswith("_bucket")]
            bounds = [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]
            assert bounds == [*BUCKETS[metric.buckets], float("inf")]
            assert counts == sorted(counts) and counts[-1] == scrape(f"{name}_count"), name
    outputs = scrape("e2e_request_latency_seconds_count")
    for part in ("queue", "prefill", "decode", "inference"):
        assert scrape(f"request_{part}_time_seconds_count") == outputs
    queue_s, prefill_s, decode_s, inference_s = (
        scrape(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode", "inference")
    )
    assert prefill_s + decode_s == pytest.approx(inference_s)
    assert queue_s + inference_s == pytest.approx(scrape("e2e_request_latency_seconds_sum"))
    assert queue_s + prefill_s == pytest.approx(scrape("time_to_first_token_seconds_sum"))
    assert scrape("step_tokens_sum") == asked.num_computed
    steps = scrape("step_duration_seconds_count")
    assert steps == scrape("step_tokens_count") == scrape("step_sequences_count") > 0
    parts = [value for (name, *_), value in scrape.values.items() if name == "ridgeline_step_seconds_total"]
    assert len(parts) == 6 and sum(parts) == pytest.approx(scrape("step_duration_seconds_sum"))
    assert 0 < scrape("queue_head_wait_seconds_total", reason="slots") < scrape("step_duration_seconds_sum")
    admitted = [value for (name, *_), value in scrape.values.items() if name == "ridgeline_prefix_cache_misses_total"]
    assert sum(admitted) >= len(asked.usages)


def test_every_metric_is_there_or_says_when_it_is(asked: Asked) -> None:
    scrape, full = Scrape.of(asked.live), metrics_pages.metrics()
    shown = {
        name.removeprefix("ridgeline_") for name in scrape.families if not name.startswith("ridgeline_engine_process")
    }
    shown -= {f"process_{name}" for name in PROCESS}
    absent = {name for name, metric in full.items() if not metric.when} - shown
    assert shown <= set(full) and not absent, (shown - set(full), absent)
    assert {f"ridgeline_engine_process_{name}" for name in PROCESS} <= set(scrape.families)
    hidden = {name for name in full if name not in shown}
    known = ("host_", "priced_", "ceiling_", "kv_canary_", "spec_decode_", "machine_speed", "speculation_gain")
    asked_for = {"request_slo", "goodput_requests", "plan_drift_ratio", "doctor_finding", "lora_requests_info"}
    assert all(name.startswith(known) or name in asked_for for name in hidden), hidden
    for name in shown:
        family = scrape.families[f"ridgeline_{name}"]
        assert (family.type, family.documentation) == (full[name].kind, full[name].text)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(full[name].labels), name


def test_clients_make_no_new_series(asked: Asked) -> None:
    def num_series() -> int:
        return sum(not name.endswith("_created") for name, *_ in Scrape.of(asked.live).values)

    before, random_name = num_series(), random.Random(1)
    for _ in range(30):
        name = f"{random_name.random()}"
        asked.live.client.get(f"/{name}", headers={"x-request-id": name, "authorization": f"Bearer {name}"})
        asked.live.post("completions", model=name, prompt="x", user=name)
    assert num_series() <= before + 1  # the code of an unknown model


def test_a_client_that_leaves_is_counted_once(asked: Asked) -> None:
    before = asked.live.metric("ridgeline_requests_aborted_total")
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{asked.live.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        next(response.iter_lines())
    eventually(lambda: asked.live.metric("ridgeline_requests_aborted_total") == before + 1)
    assert Scrape.of(asked.live)("http_responses_total", status="499") == before + 1


def test_files_are_as_the_list_makes_them() -> None:
    for path, text in metrics_pages.files().items():
        assert path.read_text() == text, f"{path.name}: python tools/metrics_pages.py --write"


def test_names_units_and_aliases() -> None:
    for name, metric in metrics_pages.metrics().items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name) and not name.endswith(("_total", "_s", "_ms"))
        assert bool(metric.buckets) == (metric.kind == "histogram") and set(metric.buckets.split()) <= set(BUCKETS)
        assert metric.text.endswith(".") and (metric.panel.partition("/")[0] in metrics_pages.ROWS or not metric.panel)
    assert {metric.vllm for metric in METRICS.values() if metric.vllm} == VLLM


def test_the_board_and_the_alerts_ask_for_nothing_else() -> None:
    full = metrics_pages.metrics()
    known = {metrics_pages.shown(name, metric): metric for name, metric in full.items()}
    histograms = {f"{name}_{part}": metric for name, metric in known.items() if metric.kind == "histogram"
                  for part in ("bucket", "sum", "count")}  # fmt: skip
    series = {name: metric for name, metric in known.items() if metric.kind != "histogram"} | histograms
    panels = json.loads((REPO / "deploy/grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    rules = yaml.safe_load((REPO / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
    for query in [*queries, *(rule["expr"] for rule in rules)]:
        for name, selector in re.findall(r"\b(ridgeline_\w+)(?:\{([^}]*)\})?", query):
            assert name in series, (name, query)
            labels = set(re.findall(r"(\w+)=~?\"", selector)) - {"instance", "job"}
            assert labels <= set(series[name].labels), query
    on_board = {name for name, metric in full.items() if any(f"ridgeline_{name}" in query for query in queries)}
    left_out = {  # facts; what others say better
        *("build_info", "choice_info", "cache_config_info", "request_inference_time_seconds"),
        *("request_prefill_kv_computed_tokens", "request_params_max_tokens", "request_params_n", "priced_steps"),
        "lora_requests_info",
    }
    assert set(full) - on_board == left_out
    places = [panel["gridPos"] for panel in panels]
    cells = Counter(
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    )
    assert max(cells.values()) == 1 and max(x for x, _ in cells) < 24, "panels lie on each other"


def journal_of(steps: list[tuple], admitted: list[str]) -> Journal:
    """A journal of steps (parts in seconds, tokens, sequences, copies, what the head waited for)."""
    journal = Journal(1, 16)
    for number, (times_s, tokens, spans, copies, waits) in enumerate(steps):
        journal.steps.append(number, 0.0, *times_s, 0, 0, tokens, spans, spans, copies, waits, 1, 1, 2, 3, 0)
    for reason in admitted:
        if reason not in journal.cache_reasons:
            journal.cache_reasons.append(reason)
        journal.decisions.append(0, 0, 1, 0, journal.cache_reasons.index(reason))
        journal.decisions.append(0, 1, 1, 2, -1)
    return journal


def random_steps(rng: random.Random, count: int) -> list[tuple]:
    nan = float("nan")
    return [
        (
            tuple(nan if part in (1, 3) and rng.random() < 0.3 else rng.random() / 100 for part in range(6)),
            *(rng.randrange(2000), rng.randrange(64), rng.randrange(3), rng.randrange(len(WAIT_REASONS))),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_steps_are_plain_sums_over_restarts(seed: int) -> None:
    rng, counts, plain = random.Random(seed), StepCounts(), []
    reasons = Counter()
    for _ in range(3):  # each a process of its own
        steps, admitted = random_steps(rng, rng.randrange(1, 60)), rng.choices(["a", "b"], k=rng.randrange(5))
        journal = journal_of(steps[:5], admitted)
        counts.follow(journal)
        for number, (times_s, *rest) in enumerate(steps[5:], 5):
            journal.steps.append(number, 0.0, *times_s, 0, 0, rest[0], rest[1], rest[1], *rest[2:], 1, 1, 2, 3, 0)
            if rng.random() < 0.3:
                counts.follow(journal)
        counts.follow(journal)
        counts.follow(journal)
        plain += steps
        reasons.update(admitted)
    whole = [times[0] + times[2] + times[4] + times[5] for times, *_ in plain]
    for distribution, values in (
        (counts.seconds, whole),
        (counts.tokens, [step[1] for step in plain]),
        (counts.sequences, [step[2] for step in plain]),
    ):
        assert distribution.sum == pytest.approx(sum(values))
        assert all(count == sum(value <= float(bound) for value in values) for bound, count in distribution.buckets())
    assert sum(counts.parts_s.values()) == pytest.approx(sum(whole))
    assert counts.parts_s["batch"] == pytest.approx(np.nansum([times[1] for times, *_ in plain]))
    assert counts.num_copies == sum(step[3] for step in plain) and counts.num_lost == 0
    assert counts.misses == reasons
    for code, reason in enumerate(WAIT_REASONS[1:], 1):
        waited = [seconds for seconds, step in zip(whole, plain) if step[4] == code]
        assert counts.waits_s.get(reason, 0) == pytest.approx(sum(waited))


def test_a_part_that_nobody_tells_is_not_there() -> None:
    counts = StepCounts()
    counts.follow(journal_of([((0.1, float("nan"), 0.2, float("nan"), 0.1, 0.1), 1, 1, 0, 0)], []))
    assert set(counts.parts_s) == {"plan", "model", "commit", "render"} and counts.host is None


def test_records_that_were_gone_are_counted_as_lost() -> None:
    counts, journal = StepCounts(), journal_of([], [])
    for number in range(CAPACITIES["steps"] + 10):
        journal.steps.append(number, 0.0, *[0.0] * 6, 0, 0, 1, 1, 1, 0, 0, 1, 1, 2, 3, 0)
    counts.follow(journal)
    assert counts.num_lost >= 10
    assert counts.tokens.sum + counts.num_lost == CAPACITIES["steps"] + 10


def test_a_distribution_counts_bounds_as_prometheus_does() -> None:
    found = Distribution("step_tokens")
    found.add(np.array([1, 1, 2, 100_000, 100_001]))
    buckets = dict(found.buckets())
    assert (buckets["1.0"], buckets["2.0"], buckets["100000.0"], buckets["+Inf"]) == (2, 3, 4, 5)
    assert step_counts.METRICS is METRICS


@pytest.fixture(scope="module")
def engine() -> LLM:
    return LLM("python-1m", num_threads=1, max_model_len=256)


def test_a_priced_step_has_the_limit_the_prediction_and_the_measurement(engine: LLM, monkeypatch) -> None:
    loop, prices = engine.engine.loop, engine.engine.prices
    assert prices is not None
    seen = []
    monkeypatch.setattr(priced, "PERIOD_S", 0.0)
    monkeypatch.setattr(priced, "load", lambda machine: priced_hardware(machine))
    monkeypatch.setattr(priced, "load_calibration", lambda machine, num_threads: None)
    real = loop.journal.step

    def step(*args) -> None:
        real(*args)
        sums = prices.look()
        seen.append((sums.num_steps, sums.measured_s, sum(sums.limit_s.values()), sum(sums.predicted_s.values())))
        assert prices.look() == sums and sums.num_steps == max(0, len(seen) - 2), "the one behind tells what one took"

    monkeypatch.setattr(loop.journal, "step", step)
    engine.generate(["def f(", "import"], use_tqdm=False)
    (_, steps), (_, spans) = loop.journal.steps.read(), loop.journal.spans.read()
    took_s = [seconds for _, _, seconds in timed_steps(steps, spans, engine.engine.executor.depth)]
    assert len(seen) == len(steps) > 4 and seen[-1][1] == pytest.approx(sum(took_s[1:-1]))
    assert all(limit_s < predicted_s for _, _, limit_s, predicted_s in seen[2:]), "a limit is below what is predicted"
    sums = prices.look()
    assert set(sums.num_bytes) == {"weights", "kv", "activations"} and set(sums.predicted_s) == {"prior"}
    assert sums.num_bytes["weights"] >= sums.num_steps * 1e6 and sums.flops > 2 * 1e6 * sums.num_steps
    assert sums.bytes_per_s == {"memory": 2e10, "cache": 1e11}


@pytest.mark.parametrize(("speculate", "are_passed_over"), [("eagle", True), ("suffix", False)])
def test_steps_that_a_model_drafts_in_are_passed_over(speculate: str, are_passed_over: bool, monkeypatch) -> None:
    llm = LLM("python-9m", num_threads=1, max_model_len=256, speculate=speculate, adaptive_speculation=False)
    monkeypatch.setattr(priced, "PERIOD_S", 0.0)
    monkeypatch.setattr(priced, "load", lambda machine: priced_hardware(machine))
    monkeypatch.setattr(priced, "load_calibration", lambda machine, num_threads: None)
    journal, prices = llm.engine.loop.journal, llm.engine.prices
    assert prices is not None
    real = journal.step
    monkeypatch.setattr(journal, "step", lambda *args: (real(*args), prices.look()))
    llm.generate(["a = 1\nb = 2\na = 1\nb ="], SamplingParams(temperature=0, max_tokens=99), use_tqdm=False)
    steps = journal.steps.read()[1][1:-1]
    drafts = (steps["num_rounds"] > 1) | (steps["num_rows"] > steps["num_spans"])
    assert drafts.any() and prices.look().num_steps == (~drafts if are_passed_over else ~drafts | drafts).sum()


def test_ops_are_timed_in_one_step_of_a_period_and_change_no_token(engine: LLM, monkeypatch) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    monkeypatch.setattr(engine.engine.ops, "_next_s", 0.0)

    def told(period_s: float) -> tuple[list[int], float]:
        monkeypatch.setattr(priced, "PERIOD_S", period_s)
        tokens = engine.generate(["def f("], greedy, use_tqdm=False)[0].outputs[0].token_ids
        return tokens, sum(engine.engine.stats().op_s.values())

    (first, begun_s), (plain, seldom_s), (timed, often_s) = told(1e9), told(1e9), told(0.0)
    assert 0 < begun_s == seldom_s == often_s, "the next one is long after"
    monkeypatch.setattr(engine.engine.ops, "_next_s", 0.0)
    again, all_s = told(0.0)
    assert first == plain == timed == again and all_s > often_s
    run_s = engine.engine.loop.journal.steps.read()[1]["run_s"].sum()
    assert all_s <= run_s and {"linear", "attention"} & {kind.split("_")[0] for kind in engine.engine.ops.by_kind}


def test_who_waits_is_told_by_reason() -> None:
    with gated_serving("python-1m") as (live, gate), ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(live.complete, prompt=f"x{i} =", max_tokens=60, ignore_eos=True) for i in range(5)]
        eventually(lambda: live.metric("ridgeline_open_outputs") == 5)

        def told(reason: str) -> float:
            gate.release(1)
            return Scrape.of(live)("num_requests_waiting_by_reason", reason=reason)

        eventually(lambda: (told("slots"), told("behind")) == (1, 2))
        gate.open()
        assert all(each.result()["choices"] for each in asked)
        eventually(lambda: live.metric("ridgeline_num_requests_waiting_by_reason") == 0)


class EqualCalibration:
    """Everything takes what its limits say."""

    mean = 1.0
    stream_bytes_per_s = None  # shares of the ceilings as they are

    def rest_of(self, pieces: object) -> Rest:
        return Rest(1e-6, 1e-6)

    def predict(self, key: str, compute_s: float, moving_s: float, num_tokens: int) -> float:
        return 1e-6 + compute_s + moving_s


def priced_hardware(machine):
    from ridgeline.cost.hardware import INPUT_KINDS, PROBE_VERSION, Ceiling, Hardware

    return Hardware(
        machine=machine, probe_version=PROBE_VERSION, measured_at="", stream_buffer_bytes=2**28, cache_bytes=2**20,
        cached_buffer_bytes=2**19, stream_bytes_per_s={1: Ceiling.of([2e10])},
        cached_bytes_per_s={1: Ceiling.of([1e11])}, reread_bytes_per_s={2**20: {1: Ceiling.of([1e11])}},
        ops_per_s={kind: {1: Ceiling.of([1e11])} for kind in INPUT_KINDS}, scalar_per_cycle=None,
    )  # fmt: skip


@pytest.mark.parametrize("known", [False, True], ids=["no ceilings", "a bug"])
def test_stats_come_also_where_no_step_can_be_priced(known: bool, monkeypatch) -> None:
    def broken(*args) -> None:
        raise RuntimeError("some bug")

    monkeypatch.setattr(priced, "load", priced_hardware if known else lambda machine: None)
    monkeypatch.setattr(priced.StepPrices, "_price", broken)
    with serving(ThreadEngine(CONFIG)) as live:
        for _ in range(2):
            live.complete(prompt="x", max_tokens=3)
            time.sleep(0.001)
            scrape = Scrape.of(live)
        assert not scrape.values.get(("ridgeline_priced_steps_total",))
        assert "ridgeline_engine_process_cpu_seconds" not in scrape.families, "it has no process of its own"
        assert scrape("step_duration_seconds_count") > 0


def test_the_board_has_what_grafana_s_dashboard_model_asks_for() -> None:
    """https://grafana.com/docs/grafana/latest/dashboards/json-model/ in so far as it says what must be."""
    board = json.loads((REPO / "deploy/grafana.json").read_text())
    assert 8 <= len(board["uid"]) <= 40 and board["title"] and board["timezone"] in ("utc", "browser")
    assert {
        "tags",
        "editable",
        "panels",
        "time",
        "templating",
        "annotations",
        "refresh",
        "schemaVersion",
    } <= board.keys()
    assert "id" not in board, "the database gives it"
    panels, variables = board["panels"], {each["name"]: each for each in board["templating"]["list"]}
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {each["type"] for each in variables.values()} <= {"query", "datasource"}
    units = {"s", "bytes", "Bps", "percentunit", "short", "flops", "watt", "hertz"}
    for panel in panels:
        place = panel["gridPos"]
        assert place.keys() == {"x", "y", "w", "h"} and place["w"] <= 24 and min(place.values()) >= 0
        assert panel["title"] and panel["type"] in ("row", "timeseries")
        if panel["type"] == "row":
            assert place["w"] == 24 and place["h"] == 1 and panel["collapsed"] is False
            continue
        assert panel["fieldConfig"]["defaults"]["unit"] in units
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters), panel["title"]
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels)))
    assert used == set(variables), "each variable is there and of use"
