"""Simulated runs: identities that hold for any clock, the engine's own decisions, and bad input in one line."""

import json
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from ridgeline import explain
from ridgeline.bench.load import Load
from ridgeline.bench.workload import BenchRequest
from ridgeline.cli import main
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.params import SamplingParams
from ridgeline.cost.efficiency import Rest
from ridgeline.engine.build import build_engine
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.pace import RecordedPace
from ridgeline.explain.simulation import run_simulated

MODEL = ("llama-3-8b", {"hardware": "h100-sxm"})


def on_card(**options):
    return simulated_machine(EngineConfig.of("llama-3-8b", **options), "h100-sxm")


def requests(count, prompt=64, output=16, gap_s=0.0):
    return [
        BenchRequest(prompt=[number + 3] * prompt, max_tokens=output, arrival_s=number * gap_s)
        for number in range(count)
    ]


def test_one_request_alone_takes_the_steps_that_it_takes():
    machine = on_card()
    found = run_simulated(machine, requests(1, prompt=600, output=9))
    record = found.log.records[0]
    assert found.num_steps == 2 + 8  # a prompt of 600 in chunks of 512, and a token each
    assert (record.output_tokens, record.prompt_tokens, record.error) == (9, 600, None)
    assert record.ttft_s == pytest.approx(found.recording.steps["run_s"][:2].sum())
    assert record.e2el_s == pytest.approx(found.recording.steps["run_s"].sum())
    decode = explain.price("llama-3-8b", context=604).limit_s
    assert record.tpot_s == pytest.approx(decode, rel=0.01)
    assert found.provenance == "datasheet"


def test_a_closed_loop_obeys_littles_law_and_conserves_tokens():
    found = run_simulated(on_card(), requests(60, output=32), max_concurrency=6)
    results = found.results
    in_flight_s = sum(record.e2el_s for record in found.log.records)
    assert in_flight_s / results.duration_s == pytest.approx(6, rel=0.05)
    assert results.output_tokens == 60 * 32 == found.recording.steps["num_rows"].sum()
    assert found.recording.steps["num_tokens"].sum() == 60 * (64 + 31)
    assert found.max_running == 6
    assert results.duration_s == pytest.approx(found.recording.steps["run_s"].sum())


def test_idle_time_passes_at_once_and_load_decides_the_batch():
    alone = run_simulated(on_card(), requests(5, gap_s=100.0))
    together = run_simulated(on_card(), requests(5))
    assert alone.results.duration_s > 400
    assert alone.busy_share < 0.01
    assert alone.max_running == 1
    assert together.max_running == 5
    assert together.busy_share == pytest.approx(1)


def test_slots_blocks_and_prefixes_are_the_engines_own():
    few = run_simulated(on_card(max_num_seqs=2), requests(8))
    assert few.max_running == 2
    assert few.mean_waiting_share > 0.5
    tight = on_card(kv_cache_bytes=131072 * 32 * 20, max_model_len=600)
    found = run_simulated(tight, requests(8, prompt=96, output=200))
    assert found.num_preemptions > 0
    assert found.kv_peak_share > 0.9
    assert {record.output_tokens for record in found.log.records} == {200}
    same = [BenchRequest(prompt=[7] * 200, max_tokens=4, arrival_s=float(number)) for number in range(3)]
    assert run_simulated(on_card(), same).results.cached_prompt_tokens == 2 * 192
    assert run_simulated(on_card(enable_prefix_caching=False), same).results.cached_prompt_tokens == 0


def test_slower_steps_are_slower_by_as_much():
    machine = on_card()
    one, slow = (run_simulated(machine, requests(4), pace=lambda _, s, f=f: f * s) for f in (1, 1.25))
    assert slow.results.duration_s == pytest.approx(1.25 * one.results.duration_s)


def test_a_simulation_adds_up_means():
    machine = simulated_machine(EngineConfig.of("python-1m", num_threads=1))
    machine.step_time._mean = 1.0
    usual = run_simulated(machine, requests(4)).recording.steps["run_s"]
    machine.step_time._mean = 1.25
    found = run_simulated(machine, requests(4))
    assert found.recording.steps["run_s"] == pytest.approx(1.25 * usual)
    again = run_simulated(machine, requests(4), pace=RecordedPace(machine, found.recording)).recording
    assert again.steps["run_s"] == pytest.approx(found.recording.steps["run_s"])


def test_a_shorter_run_meets_all_of_a_recorded_pace():
    machine = simulated_machine(EngineConfig.of("python-1m", num_threads=1))
    usual_s = run_simulated(machine, requests(4)).recording.steps["run_s"].sum()
    slow_first = run_simulated(machine, requests(4), pace=lambda begin_s, s: 3 * s if begin_s < 1.5 * usual_s else s)
    pace, took_s = RecordedPace(machine, slow_first.recording), slow_first.results.duration_s
    assert pace(0.0, usual_s) == pytest.approx(took_s)
    assert pace(0.0, usual_s / 2) > 0.7 * took_s  # its first half is slow
    assert pace.within(0.5)(0.0, usual_s / 2) == pytest.approx(took_s / 2)
    assert pace.within(0.5)(took_s / 2, usual_s / 2) == pytest.approx(took_s / 2)  # and again


def test_steps_last_by_what_they_follow_as_their_recording_tells_it():
    machine = simulated_machine(EngineConfig.of("python-1m", num_threads=1, max_num_seqs=4))
    rest = Rest(1e-3, 1e-4, 1e-2, 1e-5, came_s=0.1, gone_s=1.0)
    machine = replace(machine, step_time=machine.step_time.with_rest(rest))
    found = run_simulated(machine, [replace(each, max_tokens=9 + i % 3) for i, each in enumerate(requests(9))])
    told = list(found.recording.timed())
    assert sum(behind.gone for _, behind, _ in told) >= 3 and len(told) > 25
    assert sum(behind.came for _, behind, _ in told) == 9
    for load, behind, seconds in told:
        assert seconds == pytest.approx(machine.step_time.mean_seconds(load, behind), rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_last_longer_while_the_next_one_is_planned_anew(threads):
    machine = simulated_machine(EngineConfig.of("python-1m", num_threads=threads, max_num_batched_tokens=64))
    machine = replace(machine, step_time=machine.step_time.with_rest(Rest(1e-3, 0.0, plans_s=10.0)))
    steps = run_simulated(machine, requests(2, prompt=200, gap_s=30.0)).recording.steps
    planning = steps["run_s"] > 10
    # Each of four chunks of a prompt: behind it another one is planned, or the first token.
    assert planning.sum() == (8 if threads > 1 else 0), "nothing is planned while a thread alone computes"
    assert (steps["span_shift"][1:][planning[:-1]] == 0).all()


def test_the_pace_of_a_recording_takes_as_long_as_it_did_and_starts_again():
    machine = on_card()
    as_it_was = run_simulated(machine, requests(4))
    steps = as_it_was.recording.steps.copy()
    steps["run_s"][1::2] *= 3  # something took the machine in every other step
    steps["start_s"] = np.append(0.0, np.cumsum(steps["run_s"])[:-1])
    outputs = as_it_was.recording.outputs.copy()
    outputs["arrival_s"] += 5.0
    slow = replace(as_it_was.recording, steps=steps, outputs=outputs)
    slow.steps["start_s"] += 5.0
    pace = RecordedPace(machine, slow)
    again = run_simulated(machine, requests(4), pace=pace).recording
    assert again.steps["run_s"] == pytest.approx(steps["run_s"])
    total_s, lasted_s = as_it_was.recording.steps["run_s"].sum(), steps["run_s"].sum()
    assert pace(0.0, 2.5 * total_s) == pytest.approx(2 * lasted_s + pace(0.0, total_s / 2))
    assert pace(2 * lasted_s, total_s / 2) == pytest.approx(pace(0.0, total_s / 2))


def test_the_pace_goes_by_the_clock_and_not_by_what_was_computed():
    machine = on_card()
    busy = run_simulated(machine, requests(6, gap_s=10.0), pace=lambda begin_s, s: s * (4 if begin_s < 25 else 1))
    few = [replace(each, max_tokens=2) for each in requests(6, gap_s=10.0)]
    usual = run_simulated(machine, few).log.records
    found = run_simulated(machine, few, pace=RecordedPace(machine, busy.recording)).log.records
    ratios = [then.e2el_s / before.e2el_s for then, before in zip(found, usual)]
    assert ratios == pytest.approx([4, 4, 4, 1, 1, 1])


def test_a_model_here_is_sized_as_it_would_start():
    from ridgeline.engine.build import build_engine

    config = EngineConfig.of("python-1m", max_num_seqs=4, max_model_len=200, num_threads=1, tuning="default")
    machine, engine = simulated_machine(config), build_engine(config, lambda deltas: None)
    assert machine.setup.layout == engine.layout
    assert machine.setup.max_model_len == engine.info.max_model_len
    found = explain.simulate(config, workload="fixed:num_requests=6,input_tokens=40,output_tokens=8")
    assert found.results.completed == 6
    assert found.provenance in ("calibrated", "prior")
    assert found.sentence.startswith("6 requests to python-1m on this machine")


def test_a_trace_keeps_its_times_and_shapes(shared_data, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join((shared_data / "traces/azure2023_code.csv").read_text().splitlines()[:41]))
    found = explain.simulate("llama-3-8b", trace=trace, hardware="h100-sxm:2", goodput="ttft:500 tpot:50")
    assert found.results.completed == 40
    assert found.results.goodput.attainment > 0.9
    from ridgeline.bench.workloads import parse_workload

    arrivals = [request.arrival_s for request in parse_workload(f"azure:path={trace}").requests()]
    assert [record.arrival_s for record in found.log.records] == pytest.approx(arrivals)


def test_nothing_of_it_needs_torch():
    program = (
        "import sys; from ridgeline import explain; "
        "explain.simulate('python-1m', num_threads=1, workload='fixed:num_requests=2,input_tokens=9,output_tokens=3'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hardware", "h101"], "there is no datasheet of 'h101'"),
        (["--hardware", "ryzen-7950x"], "names no memory: give --kv-cache-bytes"),
        (["--hardware", "rtx-3090:1", "-m", "llama-3-70b"], "take rtx-3090:7, or quantize"),
        (["--hardware", "h100-sxm", "--speculate", "ngram"], "as acceptance=0.7"),
        (["--hardware", "h100-sxm", "--acceptance", "0.7"], "nothing drafts"),
        (["--hardware", "h100-sxm", "--acceptance", "7"], "must be shares from 0 to 1"),
        (["--hardware", "h100-sxm", "--kv-cache-bytes", "56000000000"], "must be at most 55,9"),
        (["--hardware", "ryzen-7950x", "--kv-cache-bytes", "999999999999999"], "16,777,216 is the most"),
        (["--hardware", "h100-sxm", "--workload", "fixed:input_tokens=9000"], "raise --max-model-len"),
        (["--hardware", "h100-sxm", "--trace", "no.txt"], "neither a .csv of Azure's trace"),
        (["--hardware", "h100-sxm", "--trace", "no.csv"], "cannot read no.csv as an Azure trace"),
        (["--replay", "/no/such/file"], "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_is_one_line(options, said, capsys):
    model = [] if "-m" in options else ["llama-3-8b"]
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *model, *options])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert said in err
    assert len(err.splitlines()) == 1
    assert not out


def test_the_command_prints_a_table_and_json(capsys):
    arguments = ["simulate", "llama-3-8b", "--hardware", "h100-sxm", "--goodput", "ttft:50", "--workload"]
    workload = "fixed:num_requests=20,input_tokens=64,output_tokens=8"
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, workload, *extra])
        assert stopped.value.code == 0
    table, _, plain = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "TTFT, ms" in table
    assert "Times are datasheet" in table
    found = json.loads(plain)
    assert found["results"]["completed"] == 20
    assert found["provenance"] == "datasheet"
    assert "<table>" in explain.simulate("llama-3-8b", hardware="h100-sxm", workload=workload)._repr_html_()
    assert msgspec.json.decode(plain.encode())["num_steps"] > 8


def test_the_table_has_the_latencies_of_the_results_under_their_names(capsys):
    workload = "fixed:num_requests=9,input_tokens=700,output_tokens=8"
    arguments = ["simulate", "llama-3-8b", "--hardware", "h100-sxm", "--goodput", "ttft:40", "--workload", workload]
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main([*arguments, *extra])
    *_, plain = lines = capsys.readouterr().out.splitlines()
    found = json.loads(plain)["results"]
    at = next(number for number, line in enumerate(lines) if line.split() == ["mean", "p50", "p90", "p99", "max"])
    names = {"TTFT, ms": "ttft_ms", "TPOT, ms": "tpot_ms", "ITL, ms": "itl_ms", "E2E latency, ms": "e2el_ms"}
    for line, (words, name) in zip(lines[at + 1 : at + 5], names.items(), strict=True):
        assert line.strip().startswith(words)
        values = [float(cell) for cell in line.strip().removeprefix(words).split()]
        assert values == pytest.approx([found["latencies"][name][q] for q in lines[at].split()], abs=0.006)
        assert values == sorted(values) or values[0] > values[1], "quantiles grow"
    share = found["goodput"]["attainment"]
    assert 0 < share < 1
    assert lines[at + 5].endswith(f"{share:.1%} of requests meet all objectives")


@pytest.mark.parametrize("card", ["ryzen-7950x", "h100-sxm"])
def test_the_bytes_of_the_cache_are_those_that_were_asked_for(card, capsys):
    workload = "fixed:num_requests=8,input_tokens=90,output_tokens=60"
    size, blocks = 32 * 131072, 12  # a block of 32 tokens has so many bytes
    shares = []
    for given in (blocks * size, 8 * blocks * size):
        options = ["--max-model-len", "200", "--kv-cache-bytes", str(given + size // 2), "--json"]
        with pytest.raises(SystemExit) as stopped:
            main(["simulate", "llama-3-8b", "--hardware", card, "--workload", workload, *options])
        assert stopped.value.code == 0
        shares.append(json.loads(capsys.readouterr().out))
    (tight, roomy), peak = shares, 8 * 5 / (8 * blocks)
    assert tight["kv_peak_share"] > 0.9 and tight["num_preemptions"] > 0 and tight["max_running"] <= blocks // 3
    assert (roomy["kv_peak_share"], roomy["num_preemptions"], roomy["max_running"]) == (pytest.approx(peak), 0, 8)


def test_one_of_a_kind_is_one(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["simulate", "llama-3-8b", "--hardware", "h100-sxm", "--workload", "fixed:num_requests=1,output_tokens=1"])
    assert capsys.readouterr().out.startswith("1 request to llama-3-8b on")
    engine = build_engine(EngineConfig.of("python-1m", journal=str(tmp_path / "journal")), lambda deltas: None)
    engine.loop.submit(engine.intake.request([5, 6, 7], SamplingParams(max_tokens=1)))
    while engine.loop.step():
        pass
    engine.loop.close()
    with pytest.raises(SystemExit):
        main(["simulate", "--replay", str(tmp_path / "journal")])
    assert capsys.readouterr().out == "1 step of 1 request: all plans are identical\n"


def test_load_decides_when_requests_come():
    load = Load(schedule="poisson", request_rate_per_s=5)
    workload = "fixed:num_requests=40,input_tokens=64,output_tokens=8"
    found = explain.simulate("llama-3-8b", hardware="h100-sxm", workload=workload, load=load)
    assert found.results.duration_s == pytest.approx(8, rel=0.05)
    with pytest.raises(ConfigError, match="must be one of ttft, tpot, e2el"):
        explain.simulate("llama-3-8b", hardware="h100-sxm", goodput="speed:3")


@pytest.mark.parametrize("options", [{"num_threads": 2}, {"num_threads": 1}, {"backend": "reference"}], ids=str)
def test_plans_are_made_as_far_ahead_as_the_engine_makes_them(options):
    config = EngineConfig.of("python-1m", tuning="default", **options)
    assert simulated_machine(config).setup.depth == build_engine(config, lambda deltas: None).setup.depth
