"""Plans: what is chosen meets its objective in a simulation of its own, reasons are figures, what cannot be is said."""

import itertools
import json
import shlex

import pytest

from ridgeline import explain
from ridgeline.bench.metrics import summarize
from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.bench.workload import BenchRequest
from ridgeline.cli import main
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import parse_slos
from ridgeline.explain import planner
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.planner import compared, plan
from ridgeline.explain.simulation import run_simulated

CARD = {"hardware": "h100-sxm"}
WORKLOAD = "fixed:num_requests=4,input_tokens=64,output_tokens=8"


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(planner, "SEQUENCES", (4, 64))
    monkeypatch.setattr(planner, "BUDGETS", (128, 512))


def requests(count=24, prompt=400, output=12, gap_s=0.0):
    return [BenchRequest(prompt=[i + 3] * prompt, max_tokens=output, arrival_s=i * gap_s) for i in range(count)]


def test_throughput_takes_many_sequences_and_low_precision_only_where_allowed():
    many = requests(40, prompt=64, output=30)
    plain = plan("llama-3-8b", many, **CARD)
    assert plain.is_met
    assert "--quantize" not in plain.chosen.changes
    assert plain.chosen.config.scheduler.max_num_seqs == 64
    allowed = plan("llama-3-8b", many, allow=["int8", "kv-int8"], **CARD)
    assert allowed.chosen.changes["--quantize"] == "int8"
    assert allowed.chosen.tokens_per_s > 1.02 * plain.chosen.tokens_per_s
    assert allowed.memory["weights"] < 0.6 * plain.memory["weights"]


def test_an_objective_is_met_by_the_simulation_of_what_was_chosen():
    slos = parse_slos("ttft:100 tpot:20")
    found = plan("llama-3-8b", requests(gap_s=0.05), slos=slos, allow=["int4"], **CARD)
    assert found.is_met
    assert "--quantize" not in found.chosen.changes  # met without losing anything
    again = run_simulated(simulated_machine(found.chosen.config, "h100-sxm"), requests(gap_s=0.05), slos=slos)
    assert again.results == found.chosen.results
    assert again.results.goodput.attainment >= 0.95
    assert found.command.startswith("ridgeline serve llama-3-8b")
    assert all("%" in reason for reason in found.reasons)
    front = [(each.tokens_per_s, each.results.latencies.tpot_ms.p50) for each in found.front]
    for (fast, slow_tpot), (slower, tpot) in itertools.pairwise(front):
        assert fast >= slower
        assert tpot < slow_tpot


def test_a_lossy_plan_comes_where_nothing_else_meets_it():
    tight = parse_slos("tpot:4")
    with pytest.raises(ConfigError, match=r"tpot within 4 ms cannot be: one step of llama-3-8b .* takes 4\.\d+ ms"):
        plan("llama-3-8b", requests(4), slos=tight, **CARD)
    found = plan("llama-3-8b", requests(4), slos=tight, allow=["int4"], **CARD)
    assert found.is_met
    assert found.chosen.changes["--quantize"] == "int4"


def test_the_nearest_is_named_where_none_meets_it(capsys):
    arguments = ["plan", "llama-3-8b", "--hardware", "h100-sxm", "--slo", "ttft:30"]
    workload = ["--workload", "fixed:num_requests=24,input_tokens=800,output_tokens=4"]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, *workload, "--json"])
    assert stopped.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["is_met"]
    assert 0 < found["chosen"]["attainment"] < 0.95
    assert found["command"] is None
    assert 30 < found["chosen"]["within_ms"]["ttft"] < 1000
    said = f"predicted ttft within {found['chosen']['within_ms']['ttft']:.4g} ms for as many"
    assert found["sentence"].startswith("No configuration searched meets ttft within 30 ms for 95% of the requests")
    assert said in found["sentence"]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, *workload])
    assert stopped.value.code == 1
    assert "ridgeline serve" not in capsys.readouterr().out


def test_what_the_nearest_is_predicted_to_keep_is_met_where_it_is_asked_for():
    asked = requests(24, prompt=800, output=4)
    nearest = plan("llama-3-8b", asked, slos=parse_slos("ttft:30"), **CARD)
    assert not nearest.is_met
    met = plan("llama-3-8b", asked, slos=parse_slos(f"ttft:{1.0001 * nearest.chosen.within_ms[0]:.3f}"), **CARD)
    assert met.is_met


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--allow", "int2"], "got 'int2'"),
        (["--verify", "--hardware", "h200"], "--verify runs the plan on this machine, and it is for h200"),
        (["--slo", "speed:3"], "must be one of ttft, tpot, e2el"),
        (["--hardware", "l4", "--dtype", "float32"], "32.1 GB of weights"),
        (["--hardware", "h200", "--workload", "fixed:input_tokens=9000,num_requests=2"], "the context is 8192"),
    ],
)
def test_what_cannot_be_is_one_line(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "llama-3-8b", *options])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_plan_is_run_here_and_printed_beside_what_was_predicted(capsys):
    workload = ["--workload", "fixed:num_requests=4,input_tokens=20,output_tokens=6", "--num-threads", "1"]
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "python-1m", "--verify", *workload])
    assert stopped.value.code in (0, 3)  # 3: this machine has other work
    out = capsys.readouterr().out
    assert "ridgeline serve python-1m" in out
    assert "predicted" in out
    assert "measured" in out


def test_the_command_has_what_was_asked_for_beside_what_was_chosen(capsys):
    given = ["--kv-cache-bytes", "2000000000", "--no-prefix-caching", "--dtype", "bfloat16"]
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "llama-3-8b", "--hardware", "ryzen-7950x", *given, "--workload", WORKLOAD, "--json"])
    assert stopped.value.code == 0
    found = json.loads(capsys.readouterr().out)
    changes = [word for pair in found["chosen"]["options"].items() for word in pair]
    serve, model, *options = found["command"].split()[1:]
    assert (serve, model) == ("serve", "llama-3-8b")
    assert sorted(options) == sorted([*given, *changes])
    blocks = 2_000_000_000 // (32 * 131072)  # of 32 tokens
    assert found["memory_bytes"]["kv_cache"] == blocks * 32 * 131072
    roomy = plan("llama-3-8b", WORKLOAD, **CARD)
    assert roomy.memory["kv_cache"] > 20e9
    assert shlex.split(roomy.command) == [
        "ridgeline", "serve", "llama-3-8b", *(word for pair in roomy.chosen.changes.items() for word in pair)
    ]  # fmt: skip


def test_figures_side_by_side():
    found = plan("llama-3-8b", requests(3), **CARD)
    record = RequestRecord(
        index=0, arrival_s=0, sent_s=0, end_s=3.0, chunk_times_s=(1.0, 3.0), prompt_tokens=9, cached_tokens=0,
        output_tokens=2, usage_reported=True, finish_reason="length", error=None,
    )  # fmt: skip
    rows = {name: pair for name, *pair in compared(found, summarize(RunLog(records=[record], duration_s=4, unsent=0)))}
    assert rows["output tokens/s"] == [found.chosen.tokens_per_s, 0.5]
    assert rows["TTFT p50, ms"][1] == 1000
    assert rows["TPOT p50, ms"][1] == 2000
    assert EngineConfig.of("llama-3-8b").scheduler.max_num_seqs == 64  # what "the defaults" are
    assert "<table>" in explain.plan("llama-3-8b", requests(2), **CARD)._repr_html_()


@pytest.mark.parametrize(("acceptance", "best"), [((0.9,), "ngram"), ((0.1,), "off")])
def test_drafts_are_planned_where_they_pay(acceptance, best):
    config = EngineConfig.of("llama-3-8b", speculate="ngram", num_speculative_tokens=4, adaptive_speculation=False)
    many = requests(64, prompt=64, output=60) if best == "off" else requests(4, prompt=64, output=120)
    found = plan(config, many, acceptance=acceptance, **CARD)
    assert found.chosen.changes["--speculate"] == best
    assert {each.changes["--speculate"] for each in found.candidates} == {"ngram", "off"}
    assert shlex.split(found.command).count("--speculate") == 1
    assert ("--num-speculative-tokens", "4") in itertools.pairwise(shlex.split(found.command))
    assert any(reason.startswith(f"--speculate {best}, not ") for reason in found.reasons)


def test_an_objective_that_drafts_alone_can_meet_is_planned_with_them():
    config = EngineConfig.of("llama-3-8b", speculate="ngram", num_speculative_tokens=4, adaptive_speculation=False)
    slos = parse_slos("tpot:3")  # a step takes 5 ms
    few = requests(2, prompt=64, output=300)
    with pytest.raises(ConfigError, match="tpot within 3 ms cannot be"):
        plan("llama-3-8b", few, slos=slos, **CARD)
    found = plan(config, few, slos=slos, acceptance=(0.9,), max_concurrency=1, **CARD)
    assert found.is_met and found.chosen.changes["--speculate"] == "ngram"


def test_who_wants_no_drafts_is_told_to_serve_without():
    found = plan(EngineConfig.of("llama-3-8b", speculate="off"), requests(2), **CARD)
    assert ("--speculate", "off") in itertools.pairwise(shlex.split(found.command))
    assert not any("--speculate" in each.changes for each in found.candidates)


def test_drafts_of_unknown_acceptance_are_not_planned():
    with pytest.raises(ConfigError, match=r"acceptance=0\.7"):
        plan(EngineConfig.of("llama-3-8b", speculate="ngram"), requests(2), **CARD)
