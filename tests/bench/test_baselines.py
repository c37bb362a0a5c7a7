"""The engine and the baselines that benchmarks/baselines.py puts beside it: the same tokens from all, and one report.

No test here judges a time; they judge tokens, counts, orders and sums.
"""

import json
import sys

import pytest
from benchmarks import baselines
from benchmarks.baselines import NaiveGeneration, StaticBatching
from rich.console import Console

from ridgeline.bench.offline import measure
from ridgeline.bench.offline_report import print_offline
from ridgeline.bench.report import SCHEMA_VERSION, result_path, write_report
from ridgeline.bench.workload import BenchRequest
from ridgeline.bench.workloads import parse_workload
from ridgeline.core.errors import ConfigError
from ridgeline.core.step import SampledToken

MIXED = "uniform:num_requests=7,input_min=3,input_max=40,output_min=1,output_max=20"


def systems_of(bench):
    return {"engine": bench.run, "static": StaticBatching(bench, 3).run, "naive": NaiveGeneration(bench).run}


def silent(system, run):
    pass


def test_all_systems_give_the_golden_tokens(bench, stories):
    with open(f"{stories}/golden_greedy.json") as file:  # noqa: PTH123
        golden = json.load(file)
    asked = [BenchRequest(prompt=golden["prompt_ids"] + golden["ids"][:k], max_tokens=30) for k in (0, 5, 17, 40)]
    expected = [golden["ids"][k : k + 30] for k in (0, 5, 17, 40)]
    for system in systems_of(bench).values():
        run = system(bench.requests(asked, temperature=0.0))
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


def test_end_of_sequence_is_honoured_where_asked(bench):
    asked = [BenchRequest(prompt=[5, 6, 7], max_tokens=12, ignore_eos=True)]
    whole = bench.run(bench.requests(asked, temperature=0.0)).token_ids[0]
    stop = whole[4]
    requests = bench.requests(asked, temperature=0.0)
    object.__setattr__(requests[0], "stop_ids", frozenset({stop}))
    for system in (bench.run, NaiveGeneration(bench).run):
        run = system(requests)
        assert run.token_ids[0] == whole[: whole.index(stop) + 1]
        assert run.log.records[0].finish_reason == "stop"


def test_a_failed_answer_is_counted_as_failed(bench, monkeypatch):
    naive = NaiveGeneration(bench)
    monkeypatch.setattr(naive, "_next_token", lambda request, output_ids: SampledToken(0, 0, error="not finite"))
    report = measure(
        bench,
        {"naive": naive.run},
        parse_workload("fixed:num_requests=2,input_tokens=4,output_tokens=4"),
        name="x",
        repeats=1,
        warmups=0,
        temperature=0.0,
        on_run=silent,
    )
    assert (report.systems[0].results.completed, report.systems[0].results.failed) == (0, 2)
    assert report.systems[0].results.errors == {"not finite": 2}


def test_only_the_engine_schedules(bench):
    asked = parse_workload(MIXED).requests()[:1]
    assert NaiveGeneration(bench).run(bench.requests(asked, temperature=0.0)).scheduling is None
    with pytest.raises(ConfigError, match=r"batch_size must be in 1\.\.8"):
        StaticBatching(bench, 9)


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
    with open("/dev/null", "w") as null:  # noqa: PTH123
        console = Console(record=True, width=160, file=null)
        print_offline(console, report)
    text = console.export_text()
    for shown in ("7 / 0", "TTFT", "plan + commit / request", "idle batch slots", "7 / 7"):
        assert shown in text


def test_the_script_puts_systems_side_by_side(stories, tmp_path, monkeypatch, capsys):
    options = {"model": stories, "workload": "fixed:num_requests=4,input_tokens=8,output_tokens=4", "batch-size": 2}
    options |= {"threads": 1, "repeats": 1, "warmups": 0, "out": tmp_path}
    monkeypatch.setattr(sys, "argv", ["baselines", *(f"--{key}={value}" for key, value in options.items())])
    monkeypatch.setenv("COLUMNS", "160")
    baselines.main()
    assert "plan + commit / request" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/*-offline.json")
    report = json.loads(path.read_text())
    assert [system["system"] for system in report["systems"]] == ["engine", "static", "naive"]
    assert [system["outputs_equal_to_first"] for system in report["systems"]] == [4, 4, 4]
