"""Offline runs on a real small model: counts that add up, the scheduler's cost, and latencies by the shape of a step.

No test here judges a time; they judge tokens, counts, orders and sums.
"""

import json

import pytest
from rich.console import Console

from ridgeline.bench.offline import measure, measure_latency, spread
from ridgeline.bench.offline_report import print_latency
from ridgeline.bench.report import result_path, write_report
from ridgeline.bench.workload import BenchRequest
from ridgeline.bench.workloads import parse_workload
from ridgeline.core.errors import ConfigError, RequestError


def silent(system, run):
    pass


MIXED = "uniform:num_requests=7,input_min=3,input_max=40,output_min=1,output_max=20"


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


def test_prefixes_are_shared_within_a_run(bench):
    asked = parse_workload(
        "shared_prefix:num_requests=4,num_prefixes=1,prefix_tokens=48,suffix_tokens=4,output_tokens=2"
    )
    run = bench.run(bench.requests(asked.requests(), temperature=0.0))
    assert sum(record.cached_tokens for record in run.log.records) > 0


def test_bad_options_are_one_clear_error(bench):
    with pytest.raises(ConfigError, match="repeats must be 1 or more"):
        measure(bench, {}, parse_workload("fixed"), name="x", repeats=0, warmups=0, temperature=0.0, on_run=silent)
    with pytest.raises(RequestError, match="maximum context length is 512 tokens"):
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


def printed(show, report):
    with open("/dev/null", "w") as null:  # noqa: PTH123
        console = Console(record=True, width=160, file=null)
        show(console, report)
    return console.export_text()
