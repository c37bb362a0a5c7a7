"""Each of the 27 planted faults is what the doctor finds first, and healthy runs have no findings at all.

Runs are simulated; what a machine or a server does to them is written into their records, as the readers of these files
and the server would have. `benchmarks/doctor_faults.py` plants them for real.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from planted import KV, ceilings, host, recorded, requests

from ridgeline.backends.probe import find_native
from ridgeline.bench.workload import BenchRequest, random_tokens
from ridgeline.core.host import HostReader, huge_page_bytes, remote_share
from ridgeline.cost.efficiency import VERSION, Calibration, Efficiency
from ridgeline.cost.hardware import INPUT_KINDS, Ceiling
from ridgeline.cost.steptime import PRIOR_REST
from ridgeline.engine import priced
from ridgeline.engine.journal import AROUND_FIELDS, HOST_FIELDS
from ridgeline.engine.recording import Recording
from ridgeline.explain import machine, rules
from ridgeline.explain.diagnosis import doctor

PLANTS: dict[str, Callable[["Plant"], Recording]] = {}


class Plant(SimpleNamespace):
    """What a plant may use: `tmp` for files of the system, `set` for the machine that the run is priced on."""


def plant(function):
    """Register the run of a fault by the name of its finding."""
    PLANTS[function.__name__] = function
    return function


class AnyKind(dict):
    """Efficiencies for whatever is asked: the prior's, as if they had been fitted."""

    def get(self, key, default=None):
        return Efficiency(compute_share=0.6, memory_share=0.8, power=2.0, overhead_s=2e-6)


def calibrated(*args):
    return Calibration(
        version=VERSION, num_threads=1, measured_at="", efficiencies=AnyKind(), held_out_error=None, rest=PRIOR_REST
    )


def own_prompts(count=24, prompt=60, output=20, gap_s=0.0):
    """Requests that have nothing in common."""
    return [
        BenchRequest(prompt=random_tokens(5, number, prompt, 4000), max_tokens=output, arrival_s=number * gap_s)
        for number in range(count)
    ]


@plant
def no_load(it):
    return recorded(own_prompts(12), max_concurrency=1)


@plant
def slots(it):
    return recorded(own_prompts(), max_num_seqs=2)


@plant
def budget_low(it):
    return recorded(own_prompts(16, prompt=400, output=4), max_num_batched_tokens=16, max_num_seqs=16)


@plant
def prefill_stalls(it):
    it.set(ops=1e9)
    bursts = [replace(each, arrival_s=0.5 * (i // 12)) for i, each in enumerate(own_prompts(48, 400, 60))]
    return recorded(bursts, max_num_batched_tokens=8192)


@plant
def kv_full(it):
    return recorded(own_prompts(24, prompt=200, output=8), kv_cache_bytes=KV * 17)


@plant
def preemption(it):
    return recorded(own_prompts(16, prompt=40, output=300), kv_cache_bytes=KV * 40)


@plant
def prefix_off(it):
    return recorded(requests(20, prompt=20, output=4, shared=400, gap_s=1e-3), enable_prefix_caching=False)


@plant
def prefix_differs(it):
    it.set(ops=1e9)
    prefix, times = random_tokens(5, 0, 384, 4000), [random_tokens(5, 1 + number, 32, 4000) for number in range(20)]
    return recorded([BenchRequest(prompt=each + prefix, max_tokens=4, arrival_s=0.0) for each in times])


@plant
def prefix_evicted(it):
    it.set(ops=1e10)
    users = [random_tokens(5, number, 320, 4000) for number in range(8)]
    turns = [BenchRequest(prompt=users[n % 8], max_tokens=4, arrival_s=5.0 * n) for n in range(24)]
    return recorded(turns, kv_cache_bytes=KV * 30)


@plant
def precision(it):
    return recorded(own_prompts(8, output=60), dtype="float32", quantize=None)


@plant
def kv_precision(it):
    return recorded(own_prompts(48, prompt=400, output=100))


@plant
def draft_loses(it):
    it.set(ops=1e10)
    run = recorded(own_prompts(16, output=100))
    spans = run.spans.copy()
    decodes = spans["num_tokens"] == 1
    for name, value in (("num_tokens", 5), ("num_rows", 5), ("num_final", 1)):
        spans[name][decodes] = value
    return replace(run, spans=spans, setup=replace(run.setup, strategy="speculative"))


@plant
def isa(it):
    levels = find_native().levels
    if len(levels) < 2:
        pytest.skip("there is one instruction set")
    it.set(stream={None: 2e8, levels[0]: 1e8})
    return recorded(own_prompts(), isa=levels[0])


@plant
def threads_few(it):
    it.set(stream={1: 1e8, 2: 2e8})
    run = recorded(own_prompts(), num_threads=1)
    return replace(run, setup=replace(run.setup, num_cores=2))


@plant
def threads_many(it):
    run = recorded(own_prompts(), num_threads=8)
    return slowed(replace(run, setup=replace(run.setup, num_cores=2)), 3)


@plant
def no_native(it):
    run = recorded(own_prompts())
    config = replace(run.setup.config, backend=replace(run.setup.config.backend, backend="reference"))
    choices = {**run.setup.choices, "backend": "reference (as asked)"}
    return slowed(replace(run, setup=replace(run.setup, config=config, choices=choices)), 5)


@plant
def stolen(it):
    return host(recorded(own_prompts()), run_delay_s=0.4)


@plant
def memory_slow(it):
    it.set(ops=1e10, calibration=calibrated)
    run = recorded(own_prompts(8, prompt=400, output=60))
    return slowed(run, np.where(run.steps["num_tokens"] <= 8, 2.0, 1.0))


@plant
def huge_pages(it):
    it.patch(rules, "LARGE_BYTES", 2**20)
    (it.tmp / "proc/self").mkdir(parents=True)
    (it.tmp / "proc/self/smaps_rollup").write_text("Rss: 200000 kB\nAnonHugePages:       0 kB\nFilePmdMapped: 0 kB\n")
    return around(recorded(own_prompts()), huge_page_bytes=[huge_page_bytes(None, it.tmp)])


@plant
def page_faults(it):
    run = recorded(own_prompts())
    return host(run, io_stall_s=0.5, major_faults=400)


@plant
def sampling(it):
    run = recorded(own_prompts())
    steps = run.steps.copy()
    steps["sample_s"] = 0.5 * steps["run_s"]
    return replace(run, steps=steps, setup=replace(run.setup, depth=1))


@plant
def client_slow(it):
    run = recorded(own_prompts())
    steps, outputs = run.steps.copy(), run.outputs.copy()
    steps["start_s"][len(steps) // 2 :] += 30
    outputs["latency_s"] += 30
    return replace(run, steps=steps, outputs=outputs)


@plant
def loop_lag(it):
    run = recorded(own_prompts())
    time_s = run.steps["start_s"][0] + np.arange(10) * 2.1
    return around(run, time_s=time_s, loop_lag_s=np.arange(10) * 2.0)


def system(it, before: dict[str, str], after: dict[str, str]):
    """A run whose machine told these files before it and behind it."""
    run = recorded(own_prompts())
    samples = []
    for files in (before, before | after):
        for name, text in files.items():
            (it.tmp / name).parent.mkdir(parents=True, exist_ok=True)
            (it.tmp / name).write_text(text)
        samples.append(HostReader(it.tmp).read())
    records = np.array(
        [(0.0, *samples[0]), (1.0, *samples[1]), (2.0, *samples[1])], [(n, "f8") for n, _ in HOST_FIELDS]
    )
    return replace(run, host=records)


@plant
def throttled(it):
    stat = "sys/fs/cgroup/cpu.stat"
    return system(it, {stat: "usage_usec 9\nnr_throttled 1\nthrottled_usec 7\n"}, {stat: "throttled_usec 90000000\n"})


@plant
def swap(it):
    status, stat, memory = "proc/self/status", "proc/self/stat", "proc/pressure/memory"
    counted = "77 (python) S 1 -1 77 0 -1 4194560 5 0 {} 0 1 2 3 4 20 0\n"
    before = {
        status: "Name:\tpython\nVmRSS:\t 900 kB\nVmSwap:\t 0 kB\n",
        stat: counted.format(3),
        memory: "some total=0\n",
    }
    after = {
        status: "Name:\tpython\nVmSwap:\t 250000 kB\n",
        stat: counted.format(90000),
        memory: "some total=90000000\n",
    }
    return system(it, before, after)


@plant
def thermal(it):
    cpu = "sys/devices/system/cpu/cpu0"
    events, clock = f"{cpu}/thermal_throttle/core_throttle_count", f"{cpu}/cpufreq/scaling_cur_freq"
    return system(it, {events: "4\n", clock: "3000000\n"}, {events: "9\n", clock: "1500000\n"})


@plant
def numa(it):
    files = {
        "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3\n",
        "proc/self/numa_maps": "7f00 default anon=90 N1=90 kernelpagesize_kB=4\n7f10 default file=/x N0=10 N1=100\n",
        "sys/devices/system/node/node0/cpulist": "0-3,8\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
    }
    for name, text in files.items():
        (it.tmp / name).parent.mkdir(parents=True, exist_ok=True)
        (it.tmp / name).write_text(text)
    assert remote_share(None, it.tmp) == pytest.approx(0.95)
    return around(recorded(own_prompts()), remote_share=[remote_share(None, it.tmp)])


def slowed(run, times):
    """The run with steps that took so many times as long as they should."""
    steps = run.steps.copy()
    steps["run_s"] *= times
    return replace(run, steps=steps)


def around(run, **values):
    """The run with what others tell of its engine."""
    records = np.full(len(next(iter(values.values()))), np.nan, list(AROUND_FIELDS))
    for name, told in values.items():
        records[name] = told
    return replace(run, around=records)


@pytest.fixture(autouse=True)
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """The machine of `ceilings`, without a calibration; `set` changes it."""

    def set_up(*, stream=None, ops=None, calibration=lambda *args: None):
        def found(native, isa=None):
            told = ceilings(native)
            if ops is not None:
                told = replace(told, ops_per_s={kind: {1: Ceiling.of([ops])} for kind in INPUT_KINDS})
            if stream is not None:
                by_threads = {1: stream[isa]} if None in stream else stream
                told = replace(told, stream_bytes_per_s={n: Ceiling.of([rate]) for n, rate in by_threads.items()})
            return told

        monkeypatch.setattr(machine, "ceilings", found)
        monkeypatch.setattr(priced, "load_calibration", calibration)

    set_up()
    return Plant(tmp=tmp_path, set=set_up, patch=monkeypatch.setattr)


def test_there_are_27():
    assert len(PLANTS) == 27
    assert set(PLANTS) | {"int8"} == {rule.id for rule in rules.RULES}  # which is no fault, but worth a try


@pytest.mark.parametrize("fault", PLANTS)
def test_it_is_found_first(fault, it):
    found = doctor(PLANTS[fault](it)).findings
    assert [each.id for each in found][:1] == [fault]
    first = found[0]
    assert any(char.isdigit() for char in first.evidence) or fault in ("no_native", "isa")
    assert first.flag and first.provenance in ("measured", "calibrated", "prior")
    assert first.gain is None or first.gain >= 1.15
    assert (first.gain is None) == (fault in ("threads_many", "no_native", "huge_pages", "numa"))
    assert first.severity == ("try" if first.gain is None or fault in ("kv_precision", "no_load") else "FIX")


HEALTHY = {
    "burst": (own_prompts(), {}),
    "long": (own_prompts(30, prompt=100, output=40), {}),
    "few": (own_prompts(4, prompt=300, output=100), {}),
    "idle": (own_prompts(12, gap_s=0.5), {}),
    "conversation": (requests(20, shared=200, gap_s=0.02), {}),
    "float32 kv in int8": (own_prompts(12), {"kv_dtype": "int8"}),
    "int4": (own_prompts(12), {"quantize": "int4"}),
    "bounded": (own_prompts(24, prompt=200, gap_s=0.1), {"max_num_batched_tokens": 2048, "max_itl_ratio": 3.0}),
}


@pytest.mark.parametrize("run", HEALTHY)
def test_healthy_runs_have_no_findings(run, it):
    asked, options = HEALTHY[run]
    recording = recorded(asked, max_concurrency=16, **options)
    time_s = recording.steps["start_s"][0] + np.arange(10) * 0.1
    recording = around(host(recording, run_delay_s=0.01, steal_s=0.01), time_s=time_s, loop_lag_s=np.arange(10) * 0.005)
    found = doctor(recording)
    assert [each.id for each in found.findings] == []
    assert math.isclose(found.match, 1, rel_tol=0.02)


def test_what_drafting_takes_is_counted_once(it):
    """With one thread, planning is around the ops of all steps; else plain ones are planned beside others."""
    run = PLANTS["draft_loses"](it)
    is_round = run.spans["num_rows"][run.steps["first_span"]] > 1
    assert is_round.any() and not is_round.all()

    def gain(depth, rounds_s, others_s):
        steps = run.steps.copy()
        steps["plan_s"] = np.where(is_round, rounds_s, others_s)
        found = doctor(replace(run, steps=steps, setup=replace(run.setup, depth=depth))).findings
        return next(each.gain for each in found if each.id == "draft_loses")

    plain = gain(1, 0.0, 0.0)
    assert gain(1, 1.0, 1.0) == pytest.approx(plain) == pytest.approx(gain(2, 0.0, 1.0))
    assert gain(2, 1.0, 1.0) > 2 * plain
    for depth in (1, 2):  # what other steps take is in both
        more = gain(depth, 2.0, 0.0) - gain(depth, 1.0, 0.0)
        assert more == pytest.approx(gain(depth, 1.0, 0.0) - plain)


def test_a_machine_slow_in_all_it_does_has_no_slow_memory(it):
    it.set(ops=1e10, calibration=calibrated)
    run = recorded(own_prompts(8, prompt=400, output=60))
    assert "memory_slow" not in [each.id for each in doctor(slowed(run, 2)).findings]
    is_decode = run.steps["num_tokens"] <= 8  # and then memory bounds it
    assert "memory_slow" not in [each.id for each in doctor(slowed(run, np.where(is_decode, 12.0, 8.0))).findings]


def test_what_clients_wait_for_is_not_what_the_machine_takes(it):
    it.set(calibration=calibrated)
    run = slowed(recorded(own_prompts()), 2)
    outputs = run.outputs.copy()
    outputs["latency_s"] += 100  # held by its readers
    first = doctor(host(replace(run, outputs=outputs), run_delay_s=0.4)).findings[0]
    assert (first.id, first.provenance) == ("stolen", "calibrated")
    assert first.gain == pytest.approx(2, rel=0.05)
