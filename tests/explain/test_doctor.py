"""Planted faults come first with their flag and a gain, and healthy runs have none.

The runs are simulated, so what is examined does not depend on this machine's load.
"""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from planted import KV, ceilings, host, recorded, requests

from ridgeline import explain
from ridgeline.bench.workload import BenchRequest
from ridgeline.cli import main
from ridgeline.core.errors import ConfigError
from ridgeline.core.machine import usable_cores
from ridgeline.engine import priced
from ridgeline.engine.journal import AROUND_FIELDS
from ridgeline.engine.recording import MAGIC, FileRecorder, read_recording
from ridgeline.explain import machine
from ridgeline.explain.diagnosis import doctor
from ridgeline.explain.evidence import Evidence
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.rules import AREAS, RULES

FAULTS = {
    "slots": (requests(), {"max_num_seqs": 2}, "--max-num-seqs 16"),
    "budget_low": (
        requests(16, prompt=400, output=4),
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        "--max-num-batched-tokens 512",
    ),
    "kv_full": (requests(24, prompt=200, output=8), {"kv_cache_bytes": KV * 17}, "--kv-cache-bytes"),
    "preemption": (requests(16, prompt=40, output=300), {"kv_cache_bytes": KV * 40}, "--kv-cache-bytes"),
    "prefix_off": (
        requests(20, prompt=20, output=4, shared=400, gap_s=1e-3),
        {"enable_prefix_caching": False},
        "--prefix-caching",
    ),
    "precision": (requests(8, output=60), {"dtype": "float32", "quantize": None}, "--dtype bfloat16"),
}


@pytest.fixture(autouse=True)
def bound_by_memory(monkeypatch):
    """Diagnose on that machine, whichever runs the test."""
    monkeypatch.setattr(machine, "ceilings", ceilings)
    monkeypatch.setattr(priced, "load_calibration", lambda *args: None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_comes_first(fault):
    asked, options, flag = FAULTS[fault]
    found = doctor(recorded(asked, **options))
    assert found.findings, found.sentence
    first = found.findings[0]
    assert (first.id, first.severity) == (fault, "FIX")
    assert first.flag.startswith(flag)
    assert first.gain >= 1.15
    assert any(char.isdigit() for char in first.evidence)
    assert found.match == pytest.approx(1, rel=0.02)


def test_evicted_prefixes():
    turns = [
        BenchRequest(prompt=[user + 9] * 320, max_tokens=4, arrival_s=0.5 * number)
        for number, user in enumerate(list(range(8)) * 3)
    ]
    found = doctor(recorded(turns, kv_cache_bytes=KV * 30, max_num_batched_tokens=64))
    assert "prefix_evicted" in [each.id for each in found.findings]


@pytest.mark.parametrize(
    "asked",
    [
        requests(),
        requests(12, gap_s=0.5),
        requests(30, prompt=100, output=40),
        requests(20, shared=200, gap_s=0.02),
        requests(4, prompt=300, output=100),
    ],
    ids=["burst", "idle", "long", "shared", "few"],
)
def test_healthy_runs_have_nothing_to_fix(asked):
    found = doctor(recorded(asked, max_concurrency=16))
    assert [each.id for each in found.findings if each.severity == "FIX"] == []
    assert [line[0] for line in found.lines() if line[1] == "ok"] == [
        area for area in AREAS if area not in {each.area for each in found.findings}
    ]


def test_the_machine_comes_before_all_else():
    slow = recorded(*FAULTS["slots"][:1], **FAULTS["slots"][1])
    for counter, fault in (("run_delay_s", "stolen"), ("steal_s", "stolen"), ("throttled_s", "throttled")):
        of_all = usable_cores() if counter == "steal_s" else 1  # what is stolen is summed over the cores
        found = doctor(host(slow, **{counter: 0.4 * of_all}))
        assert [each.id for each in found.findings][:2] == [fault, "slots"]
        assert found.findings[0].gain == pytest.approx(1 / 0.6, rel=0.01)
        assert found.findings[0].provenance == "measured"
        assert doctor(host(slow, **{counter: 0.01})).findings[0].id == "slots"
    steps = slow.steps.copy()
    steps["sample_s"] = 0.5 * steps["run_s"]
    assert doctor(replace(slow, steps=steps, setup=replace(slow.setup, depth=1))).findings[0].id == "sampling"


def test_sampling_beside_the_next_step_takes_one_of_its_threads():
    run = recorded(requests(4, output=100))
    steps = run.steps.copy()
    steps["sample_s"] = 0.5 * steps["run_s"]
    followed = float(steps["run_s"][steps["span_shift"] > 0].sum() / steps["run_s"].sum())
    assert 0.5 < followed < 1
    for depth, threads, lost in ((1, 2, 0.5), (2, 1, 0.5), (2, 2, 0.5 - 0.25 * followed)):
        config = replace(run.setup.config, num_threads=threads)
        setup = replace(run.setup, depth=depth, config=config, num_cores=threads)
        found = {each.id: each for each in doctor(replace(run, steps=steps, setup=setup)).findings}
        assert found["sampling"].gain == pytest.approx(1 / (1 - lost), rel=1e-3)


def test_a_request_passes_through_a_late_event_loop_three_times():
    run = recorded(requests(6, output=60))
    outputs = run.outputs.copy()
    outputs["latency_s"] += 1.0  # between what times a request and the engine
    outputs["queue_s"] += 1.0
    told = np.full(11, np.nan, list(AROUND_FIELDS))
    told["time_s"] = run.steps["start_s"][0] + np.arange(11) * 1.6
    told["loop_lag_s"] = np.arange(11) * 1.5
    (late,) = (each for each in doctor(replace(run, outputs=outputs, around=told)).findings if each.id == "loop_lag")
    engine_s = (run.outputs["latency_s"] - run.outputs["queue_s"]).mean()
    assert late.gain == pytest.approx(1 + 3 * 1.5 / engine_s)
    assert late.evidence == "it is late 94% of the time, 1,500 ms at the mean"


def test_two_faults_keep_the_order():
    wide = recorded(requests(24, output=30), max_num_seqs=2, dtype="float32", quantize=None)
    assert [each.id for each in doctor(wide).findings] == ["slots", "precision"]


def test_a_run_that_was_slower_than_it_should_be_says_so():
    run = recorded(requests(4))
    steps = run.steps.copy()
    steps["run_s"] *= 2
    found = doctor(replace(run, steps=steps))
    assert found.match == pytest.approx(0.5, rel=0.02)
    assert "low confidence" in found.sentence


def test_the_command_reads_a_journal(tmp_path, capsys, monkeypatch):
    from ridgeline import LLM, SamplingParams

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is calibrated
    path = tmp_path / "journal"
    options = {"num_threads": usable_cores(), "tuning": "default", "max_model_len": 256, "max_num_seqs": 1}
    llm = LLM("python-1m", journal=str(path), **options)
    llm.generate([[5, i + 9] for i in range(12)], SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
    llm.engine.loop.close()
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            main(["doctor", str(path), *extra])
        assert stopped.value.code == 1
    table, _, plain = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "too few sequences run at once" in table
    assert "--max-num-seqs 16" in table
    findings = json.loads(plain)["findings"]
    assert "slots" in [each["id"] for each in findings]
    for one, other in itertools.pairwise(findings):
        assert AREAS.index(one["area"]) <= AREAS.index(other["area"])
    assert "<table>" in explain.doctor(path)._repr_html_()


def test_the_command_tries_a_model(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the machine is measured
    monkeypatch.setattr("ridgeline.cli.doctor.SELF_TEST_S", 0.2)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--model", "python-1m", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["num_requests"] % 16 == 0 < found["num_steps"]
    assert stopped.value.code == int(any(each["severity"] == "FIX" for each in found["findings"]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "give one of these"),
        (["run.journal", "--model", "python-1m"], "give one of these"),
        (["--url", "nonsense"], "is the server up"),
        (["--url", "http://127.0.0.1:1"], "is the server up"),
        (["--url", "http://127.0.0.1:x"], "is the server up"),
        (["--url", "http://127.0.0.1:1", "--trace", "out.json"], "of a journal"),
    ],
)
def test_what_cannot_be_asked_is_one_line(given, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *given])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())


def test_an_engine_that_drafts_is_examined_as_without_drafts(tmp_path, capsys):
    from ridgeline import LLM, SamplingParams

    path = tmp_path / "journal"
    options = {"num_threads": usable_cores(), "tuning": "default", "max_model_len": 256, "max_num_seqs": 1}
    llm = LLM("python-1m", journal=str(path), speculate="ngram", adaptive_speculation=False, **options)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    llm.generate([[5, i + 9] for i in range(8)], params, use_tqdm=False)
    llm.engine.loop.close()
    found = doctor(path)
    assert not found.is_simulated
    assert "gains are those without drafts" in found.sentence
    slots = next(each for each in found.findings if each.id == "slots")
    assert slots.gain is not None and slots.gain > 1.5
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", str(path)])
    assert stopped.value.code == int(
        any(each.severity == "FIX" for each in found.findings)
    )  # of a busy machine, perhaps
    assert f"--max-num-seqs 16: {slots.gain:.2f}×" in capsys.readouterr().out
    seq_id = int(read_recording(path).outputs["seq_id"][-1])
    lived = explain.life(path, seq_id)
    kinds = {step[2] for step in lived["steps"]}
    assert kinds == {"prefill", "decode"}
    assert max(step[3] for step in lived["steps"] if step[2] == "decode") > 1  # drafts, and the token before them
    assert sum(lived["decoding"].values()) == pytest.approx(lived["parts"]["decode"])


def test_threads_are_compared_with_the_cores_of_the_machine_that_was_recorded():
    run = recorded(requests(6, output=60), num_threads=1)
    assert run.setup.num_cores == usable_cores()
    for cores, ids in ((1, []), (64, ["threads_few"]), (None, [])):  # None: an old journal does not say
        setup = replace(run.setup, num_cores=cores)
        evidence = Evidence(
            replace(run, setup=setup), setup, setup.config, simulated_machine(setup.config), drafts=False
        )
        signs = {rule.id: sign for rule in RULES if rule.area == "machine" and (sign := rule.look(evidence))}
        assert list(signs) == ids
        assert [sign.evidence for sign in signs.values()] == ["1 thread on 64 cores"] * len(ids)
        assert [sign.cure.num_threads for sign in signs.values()] == [64] * len(ids)


def test_what_cannot_be_examined(tmp_path):
    run = recorded(requests(3))
    for changed, said in (
        (replace(run, outputs=run.outputs[:0]), "holds no finished request"),
        (replace(run, steps=run.steps[:0]), "or no step"),
        (replace(run, setup=replace(run.setup, strategy="diffusion")), "decode one token at a time"),
    ):
        with pytest.raises(ConfigError, match=said):
            doctor(changed)
    path = tmp_path / "empty"
    FileRecorder(path, run.setup).close()
    assert path.read_bytes().startswith(MAGIC)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", str(path)])
    assert stopped.value.code == 2
