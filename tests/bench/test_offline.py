"""Offline runs on a real small model: the same tokens from every system, counts that add up, and the scheduler's cost.

No test here judges a time; they judge tokens, counts, orders and sums.
"""

import json

import pytest
from rich.console import Console

from ridgeline.bench.baselines import StaticBatching
from ridgeline.bench.latency import measure_latency
from ridgeline.bench.naive import NaiveGeneration
from ridgeline.bench.offline import BenchEngine, measure, spread
from ridgeline.bench.offline_report import print_latency, print_offline
from ridgeline.bench.report import SCHEMA_VERSION, result_path, write_report
from ridgeline.bench.workload import BenchRequest
from ridgeline.bench.workloads import parse_workload
from ridgeline.core.config import EngineConfig, ModelConfig, SchedulerConfig
from ridgeline.core.errors import ConfigError, RequestError
from ridgeline.core.step import SampledToken


@pytest.fixture(scope="module")
def bench(stories):
    return BenchEngine(
        EngineConfig(
            model=ModelConfig(model=stories, dtype="float32"),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
            num_threads=1,
        )
    )


def systems_of(bench):
    return {"engine": bench, "static": StaticBatching(bench, 3), "naive": NaiveGeneration(bench)}


def silent(system, run):
    pass


MIXED = "uniform:num_requests=7,input_min=3,input_max=40,output_min=1,output_max=20"


def test_all_systems_give_the_golden_tokens(bench, stories):
    with open(f"{stories}/golden_greedy.json") as file:  # noqa: PTH123
        golden = json.load(file)
    asked = [BenchRequest(prompt=golden["prompt_ids"] + golden["ids"][:k], max_tokens=30) for k in (0, 5, 17, 40)]
    expected = [golden["ids"][k : k + 30] for k in (0, 5, 17, 40)]
    for system in systems_of(bench).values():
        run = system.run(bench.requests(asked, temperature=0.0))
        assert run.token_ids == expected
        assert [record.output_tokens for record in run.log.records] == [30] * 4
        assert {record.finish_reason for record in run.log.records} == {"length"}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_systems_agree_on_mixed_lengths_and_the_report_adds_up(bench, temperature):
    workload = parse_workload(MIXED)
    heard = []
    report = measure(
        bench,
        systems_of(bench),
        workload,
        name="x",
        repeats=2,
        warmups=1,
        temperature=temperature,
        on_run=lambda system, run: heard.append(system),
    )
    assert heard == ["engine", "static", "naive"] * 3  # interleaved
    output_tokens = sum(request.max_tokens for request in workload.requests())
    for system in report.systems:
        assert (system.results.completed, system.results.failed) == (7, 0)
        assert system.results.output_tokens == output_tokens
        assert system.results.cached_prompt_tokens == 0  # no run finds the prompts of the one before it
        assert system.outputs_equal_to_first == 7
        assert system.output_tok_per_s.min <= system.output_tok_per_s.median <= system.output_tok_per_s.max
        assert system.results.latencies.ttft_ms.count == 7


def test_scheduling_cost_is_of_the_measured_run_alone(bench):
    asked = parse_workload(MIXED).requests()
    runs = [bench.run(bench.requests(asked, temperature=0.0)) for k in range(2)]
    for run in runs:
        cost = run.scheduling
        assert cost.num_requests == 7
        assert cost.num_sampled_tokens == sum(request.max_tokens for request in asked)
        assert cost.num_steps >= max(request.max_tokens for request in asked)
        assert cost.plan_s > 0 and cost.commit_s > 0
        assert cost.s_per_request == pytest.approx((cost.plan_s + cost.commit_s) / 7)
        assert cost.s_per_step == pytest.approx((cost.plan_s + cost.commit_s) / cost.num_steps)
        assert 0 < cost.share_of_run < 1
    assert runs[0].scheduling.num_steps == runs[1].scheduling.num_steps
    assert NaiveGeneration(bench).run(bench.requests(asked[:1], temperature=0.0)).scheduling is None


def test_static_batches_wait_for_their_longest_member(bench):
    asked = [BenchRequest(prompt=[5, 6, 7], max_tokens=tokens) for tokens in (2, 8, 4, 6, 3)]
    run = StaticBatching(bench, 2).run(bench.requests(asked, temperature=0.0))
    records = run.log.records
    for early, late in (((0, 1), (2, 3)), ((2, 3), (4,))):
        assert max(records[k].end_s for k in early) < min(records[k].chunk_times_s[0] for k in late)
    assert run.idle_slot_share == pytest.approx(1 - 23 / (2 * 8 + 2 * 6 + 1 * 3))
    assert run.scheduling.num_steps == 8 + 6 + 3  # a batch's prompts fit one step
    together = bench.run(bench.requests(asked, temperature=0.0))
    assert together.scheduling.num_steps == 8
    assert together.token_ids == run.token_ids


def test_prefixes_are_shared_within_a_run(bench):
    asked = parse_workload(
        "shared_prefix:num_requests=4,num_prefixes=1,prefix_tokens=48,suffix_tokens=4,output_tokens=2"
    )
    run = bench.run(bench.requests(asked.requests(), temperature=0.0))
    assert sum(record.cached_tokens for record in run.log.records) > 0


def test_end_of_sequence_is_honoured_where_asked(bench):
    asked = [BenchRequest(prompt=[5, 6, 7], max_tokens=12, ignore_eos=True)]
    whole = bench.run(bench.requests(asked, temperature=0.0)).token_ids[0]
    stop = whole[4]
    requests = bench.requests(asked, temperature=0.0)
    object.__setattr__(requests[0], "stop_ids", frozenset({stop}))
    for system in (bench, NaiveGeneration(bench)):
        run = system.run(requests)
        assert run.token_ids[0] == whole[: whole.index(stop) + 1]
        assert run.log.records[0].finish_reason == "stop"


def test_a_failed_answer_is_counted_as_failed(bench, monkeypatch):
    naive = NaiveGeneration(bench)
    monkeypatch.setattr(naive, "_next_token", lambda request, output_ids: SampledToken(0, 0, error="not finite"))
    report = measure(
        bench,
        {"naive": naive},
        parse_workload("fixed:num_requests=2,input_tokens=4,output_tokens=4"),
        name="x",
        repeats=1,
        warmups=0,
        temperature=0.0,
        on_run=silent,
    )
    assert (report.systems[0].results.completed, report.systems[0].results.failed) == (0, 2)
    assert report.systems[0].results.errors == {"not finite": 2}


def test_bad_options_are_one_clear_error(bench):
    with pytest.raises(ConfigError, match=r"batch_size must be in 1\.\.8"):
        StaticBatching(bench, 9)
    with pytest.raises(ConfigError, match="repeats must be 1 or more"):
        measure(bench, {}, parse_workload("fixed"), name="x", repeats=0, warmups=0, temperature=0.0, on_run=silent)
    with pytest.raises(RequestError, match="context is 512 tokens"):
        bench.requests([BenchRequest(prompt=[5], max_tokens=5000)], temperature=0.0)


def test_spread_is_of_measured_rates():
    assert (spread([3.0, 1.0, 2.0]).median, spread([4.0, 1.0, 2.0, 3.0]).median) == (2.0, 2.0)
    assert (spread([3.0, 1.0, 2.0]).min, spread([3.0, 1.0, 2.0]).max) == (1.0, 3.0)


def test_latency_points(bench, tmp_path):
    options = {"name": "lat", "prompt_tokens": 4, "output_tokens": 6, "repeats": 2, "warmups": 1}
    report = measure_latency(bench, prefill=[8, 100], decode=[1, 8], **options)
    assert [(point.kind, point.tokens_per_step) for point in report.points] == [
        ("prefill", 8),
        ("prefill", 100),
        ("decode", 1),
        ("decode", 8),
    ]
    assert [point.scheduling.num_steps for point in report.points] == [1, 4, 7, 7]
    for point in report.points:
        assert point.ms * point.tok_per_s.median / 1000 == pytest.approx(point.tokens_per_step)
    with pytest.raises(ConfigError, match=r"decode must be in 1\.\.8"):
        measure_latency(bench, prefill=[], decode=[9], **options)
    with pytest.raises(ConfigError, match="ask for more output tokens"):
        measure_latency(bench, prefill=[], decode=[4], **options | {"prompt_tokens": 100, "output_tokens": 1})
    path = result_path(tmp_path, report)
    write_report(path, report)
    assert json.loads(path.read_text())["points"][3]["scheduling"]["num_requests"] == 8
    assert "decode 8" in printed(print_latency, report)


def test_the_report_on_disk_and_on_screen(bench, tmp_path):
    report = measure(
        bench,
        systems_of(bench),
        parse_workload(MIXED),
        name="off",
        repeats=1,
        warmups=0,
        temperature=0.0,
        on_run=silent,
    )
    path = result_path(tmp_path, report)
    write_report(path, report)
    assert path.name == f"{report.created_utc[:10]}-off.json"
    plain = json.loads(path.read_text())
    assert plain["schema_version"] == SCHEMA_VERSION
    assert [system["system"] for system in plain["systems"]] == ["engine", "static", "naive"]
    assert plain["systems"][0]["scheduling"]["s_per_request"] > 0
    assert plain["engine"]["choices"]["dtype"] == "float32"
    text = printed(print_offline, report)
    for shown in ("7 / 0", "TTFT", "plan + commit / request", "idle batch slots", "7 / 7"):
        assert shown in text


def printed(show, report):
    with open("/dev/null", "w") as null:  # noqa: PTH123
        console = Console(record=True, width=160, file=null)
        show(console, report)
    return console.export_text()
