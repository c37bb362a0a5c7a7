"""What is planted: for each fault a run with it, and one without; healthy runs too. For `doctor_faults.py`."""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.backends.probe import Moment, ceilings, find_native
from ridgeline.bench.arrivals import Arrivals, greedy_requests
from ridgeline.bench.calibrate import MAX_BATCH, MAX_PROMPT, calibration
from ridgeline.bench.metrics import Results, summarize
from ridgeline.bench.profile import Profiler, scheduler_config
from ridgeline.bench.workload import BenchRequest, random_tokens
from ridgeline.core.config import EngineConfig
from ridgeline.core.host import HostReader, remote_share
from ridgeline.core.params import SamplingParams
from ridgeline.cost.hardware import load_calibration, save_calibration
from ridgeline.engine.build import build_engine
from ridgeline.engine.journal import AROUND_FIELDS
from ridgeline.engine.recording import Recording, read_recording
from ridgeline.explain.diagnosis import Diagnosis, doctor

SMALL, WIDE = "python-9m", "RIDGELINE_WIDE"  # a bundled model, and the variable with the folder of a larger one
CACHE = "RIDGELINE_DOCTOR_CACHE"  # the variable with the folder of calibrations
BLOCK = 32
PR_SET_THP_DISABLE, MADV_PAGEOUT = 41, 21
SPIN = "while True: pass"
STREAM = """
import os
from ridgeline import _native
os.sched_setaffinity(0, {1})
while True:
    _native.read_bandwidth(_native.best_level(), 1, 2**28, 500)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """What was found, the fault at `rank`; the rest is of its finding, or of the first one of a healthy run.

    `realised` is what the change did, by the measure that the finding has.
    """

    fault: str
    found: list[str]
    right: bool
    rank: int | None = None
    sentence: str = ""
    evidence: str = ""
    flag: str = ""
    gain: float | None = None
    provenance: str = ""
    effect: str = ""
    realised: float | None = None
    gains: list[float] = field(default_factory=list)  # of several runs
    ratios: list[float] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)  # of the run itself, by effect
    match: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Requests, and the engine that gets them; `beside` is there while it runs."""

    requests: list[BenchRequest]
    options: Mapping[str, object] = field(default_factory=dict)
    model: str = WIDE
    concurrency: int | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    beside: Callable[[], Any] = nullcontext
    read_host: Callable[[], Any] | None = None

    def config(self, threads: int) -> EngineConfig:
        base = {"dtype": "bfloat16", "quantize": "int8", "num_threads": threads, "tuning": "default"}
        model = os.environ[WIDE] if self.model == WIDE else self.model
        return EngineConfig.of(model, **base | dict(self.options))


class Plant:
    """Runs one engine in this process: with the fault, or `without` it."""

    def __init__(self, name: str, threads: int, *, without: bool = False) -> None:
        self.name, self.threads, self.without = name, threads, without

    def run(self, run: Run) -> tuple[Results, Recording]:
        """Run the requests, after one so long that a step's memory has been touched."""
        arrivals = Arrivals()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal"
            engine = build_engine(replace(run.config(self.threads), journal=str(path)), arrivals.deliver)
            if run.read_host is not None:
                engine.loop._read_host = run.read_host
            requests = greedy_requests(run.requests)
            if run.params:
                params = SamplingParams(ignore_eos=True, **run.params)
                requests = [replace(r, params=replace(params, max_tokens=r.max_tokens)) for r in requests]
            arrivals.run(engine.loop, greedy_requests([BenchRequest(prompt=[5] * 480, max_tokens=8)], run=1))
            num_warm = engine.loop.journal.steps.num_written
            with run.beside():
                log = arrivals.run(engine.loop, requests, run.concurrency)
            engine.loop.close()
            return summarize(log), _without_first(read_recording(path), num_warm)

    def mended(self, fault: Run, without: Run | None = None) -> Planted:
        """Run with the fault and ask the doctor, or run without it."""
        if self.without:
            run = without or fault
            with use_cache(run.model):
                return Planted(fault=self.name, found=[], right=True, measures=_measures(self.run(run)[0]))
        with use_cache(fault.model):
            was, recording = self.run(fault)
            return replace(self.found(doctor(recording)), measures=_measures(was))

    def found(self, diagnosis: Diagnosis) -> Planted:
        """Return what was found."""
        ids = [each.id for each in diagnosis.findings]
        fault, healthy = self.name.partition(",")[0], self.name.startswith("healthy")
        at = 0 if healthy else ids.index(fault) if fault in ids else len(ids)
        planted = Planted(fault=self.name, found=ids, right=not ids if healthy else ids[:1] == [fault])
        planted = replace(planted, sentence=diagnosis.sentence, match=diagnosis.match)
        if at == len(ids):
            return planted
        told = ("evidence", "flag", "gain", "provenance", "effect")
        return replace(planted, rank=at + 1, **{name: getattr(diagnosis.findings[at], name) for name in told})


def _without_first(recording: Recording, num_steps: int) -> Recording:
    """Return a recording without its first steps, and what came before them."""
    outputs = recording.outputs[recording.outputs["first_step"] >= num_steps]
    for name in ("first_step", "last_step"):
        outputs[name] -= num_steps
    steps = recording.steps[num_steps:].copy()
    first_span = int(steps["first_span"][0])
    steps["first_span"] -= first_span
    return replace(recording, steps=steps, spans=recording.spans[first_span:], outputs=outputs)


def _measures(results: Results) -> dict[str, float]:
    found = results.latencies
    return {
        "requests end sooner": found.e2el_ms.mean,
        "gaps between tokens are shorter": found.itl_ms.mean_over_time,
        "more tokens a second": results.duration_s,
    }


@contextmanager
def use_cache(model: str) -> Iterator[None]:
    """Use what was calibrated for a model: the efficiencies of both have the same names."""
    os.environ["XDG_CACHE_HOME"] = str(Path(os.environ[CACHE]) / ("wide" if model == WIDE else "small"))
    yield


def own(count: int, prompt: int, output: int, gap_s: float = 0.0, shared: int = 0) -> list[BenchRequest]:
    """Requests that have nothing in common but `shared` tokens at their beginning."""
    begin = random_tokens(7, 0, shared, 4000)
    prompts = (begin + random_tokens(5, number, prompt, 4000) for number in range(count))
    return [BenchRequest(prompt=each, max_tokens=output, arrival_s=i * gap_s) for i, each in enumerate(prompts)]


def calibrate(run: Run, threads: int) -> None:
    """Fit the efficiencies of the ops of a run's engine."""
    config = replace(run.config(threads), scheduler=scheduler_config(MAX_BATCH, MAX_PROMPT))
    config = replace(config, cache=replace(config.cache, prefix_caching=False))
    hardware = ceilings(find_native())
    moment = Moment(find_native(), hardware.machine.isa_level, threads) if hardware.machine.isa_level else None
    profiler = Profiler(build_engine(config, lambda deltas: None), hardware, threads, moment=moment)
    save_calibration(hardware.machine, calibration(profiler, threads))


@contextmanager
def processes(code: str, count: int) -> Iterator[None]:
    """Have so many of them beside the run."""
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    time.sleep(1)
    try:
        yield
    finally:
        for each in running:
            each.kill()


@contextmanager
def paged_out() -> Iterator[None]:
    """Take the mapped pages of packed weights away, again and again."""
    libc, ended = ctypes.CDLL(None), threading.Event()
    maps = re.findall(r"^(\w+)-(\w+) .* (/\S*/packs/\S+)$", Path("/proc/self/maps").read_text(), re.M)
    ranges = [(int(first, 16), int(last, 16)) for first, last, _ in maps]
    assert ranges, "the weights are not mapped from a file"

    def take() -> None:
        while not ended.wait(0.05):
            for first, last in ranges:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_PAGEOUT)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def calibrated(it: Plant, *options: Mapping[str, object], model: str = WIDE) -> Planted:
    """Fit a model in some formats; the last one keeps what all have."""
    with use_cache(model):
        for each in options:
            calibrate(Run([], each, model), it.threads)
    return Planted(fault=it.name, found=[], right=True)


def of_system(it: Plant, before: Mapping[str, str], after: Mapping[str, str]) -> Planted:
    """Run while the files of a system, in a folder of their own, tell what they told before, and then after."""
    with tempfile.TemporaryDirectory() as folder:
        root, count = Path(folder), 0

        def write(files: Mapping[str, str]) -> None:
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)

        write(before)
        reader = HostReader(root)

        def read() -> object:
            nonlocal count
            count += 1
            if count == 3:
                write(after)
            return reader.read()

        found = it.mended(Run(own(100, 64, 60), read_host=read))
        return replace(found, measures={})  # nothing was disturbed but what these files say


PLANTS: dict[str, Callable[[Plant], Planted]] = {}


def plant(name: str) -> Callable[[Callable[[Plant], Planted]], Callable[[Plant], Planted]]:
    """Name what plants a fault."""

    def register(function: Callable[[Plant], Planted]) -> Callable[[Plant], Planted]:
        PLANTS[name] = function
        return function

    return register


MIXED, SHORT = own(40, 64, 60), own(16, 64, 40)
STORM = own(16, 40, 300)
TURNS = [BenchRequest(prompt=random_tokens(5, n % 8, 400, 4000), max_tokens=4, arrival_s=0.15 * n) for n in range(32)]
BURSTS = [replace(each, arrival_s=0.3 * (n // 12)) for n, each in enumerate(own(96, 800, 80))]
TIMES = [random_tokens(5, n, BLOCK, 4000) for n in range(20)]
COMMON = random_tokens(7, 0, 384, 4000)
STAMPED = [BenchRequest(prompt=time + COMMON, max_tokens=4) for time in TIMES]
SORTED = [BenchRequest(prompt=COMMON + time, max_tokens=4) for time in TIMES]
LONG = own(6, 2000, 1200)
TALKS = [replace(each, max_tokens=20 + 7 * n % 60) for n, each in enumerate(own(60, 40, 0, shared=200))]
KV = 786_432  # bytes of a block of the larger model
DRAFTS = {"speculate": "ngram", "adaptive_speculation": False, "prompt_lookup_min": 1}
OPTIONS: Mapping[str, tuple[Run, Run | None]] = {
    "no_load": (Run(own(32, 64, 90), concurrency=1), Run(own(32, 64, 90), concurrency=16)),
    "slots": (Run(MIXED, {"max_num_seqs": 2}), Run(MIXED, {"max_num_seqs": 16})),
    "budget_low": (
        Run(own(60, 800, 4), {"max_num_batched_tokens": 16, "max_num_seqs": 16}, SMALL),
        Run(own(60, 800, 4), {"max_num_batched_tokens": 512, "max_num_seqs": 16}, SMALL),
    ),
    "prefill_stalls": (
        Run(BURSTS, {"max_num_batched_tokens": 8192}, SMALL),
        Run(BURSTS, {"max_num_batched_tokens": 512}, SMALL),
    ),
    "kv_full": (
        Run(own(24, 200, 100), {"kv_cache_bytes": KV * 20}),
        Run(own(24, 200, 100), {"kv_cache_bytes": KV * 80}),
    ),
    "preemption": (Run(STORM, {"kv_cache_bytes": KV * 40}), Run(STORM, {"kv_cache_bytes": KV * 160})),
    "prefix_off": (Run(own(40, 20, 4, 0.01, 400), {"enable_prefix_caching": False}), Run(own(40, 20, 4, 0.01, 400))),
    "prefix_differs": (Run(STAMPED), Run(SORTED)),
    "prefix_evicted": (Run(TURNS, {"kv_cache_bytes": KV * 60}), Run(TURNS, {"kv_cache_bytes": KV * 240})),
    "precision": (
        Run(own(8, 64, 60), {"dtype": "float32", "quantize": None}),
        Run(own(8, 64, 60), {"quantize": None}),
    ),
    "kv_precision": (Run(LONG), Run(LONG, {"kv_dtype": "int8"})),
    "draft_loses": (
        Run(own(16, 100, 300), DRAFTS, SMALL, params={"temperature": 1.0}),
        Run(own(16, 100, 300), {}, SMALL, params={"temperature": 1.0}),
    ),
    "slots, six users": (
        Run(TALKS, {"max_num_seqs": 1}, concurrency=6),
        Run(TALKS, {"max_num_seqs": 16}, concurrency=6),
    ),
    "prefix_off, six users": (Run(TALKS, {"enable_prefix_caching": False}, concurrency=6), Run(TALKS, concurrency=6)),
    "precision, six users": (
        Run(TALKS, {"dtype": "float32", "quantize": None}, concurrency=6),
        Run(TALKS, {"quantize": None}, concurrency=6),
    ),
    "isa": (Run(SHORT, {"isa": "avx2"}), Run(SHORT)),
    "threads_few": (Run(SHORT, {"num_threads": 1}), Run(SHORT)),
    "threads_many": (Run(SHORT, {"num_threads": 8}), Run(SHORT)),
    "no_native": (Run(own(8, 64, 10), {"backend": "reference"}), Run(own(8, 64, 10))),
    "stolen": (Run(MIXED, beside=lambda: processes(SPIN, 2)), Run(MIXED)),
    "page_faults": (Run(own(24, 64, 60), beside=paged_out), Run(own(24, 64, 60))),
    "sampling": (
        Run(own(64, 100, 60), {}, SMALL, params={"temperature": 0, "logprobs": 20}),
        Run(own(64, 100, 60), {}, SMALL),
    ),
    "healthy burst": (Run(SHORT), None),
    "healthy, seldom asked": (Run(own(16, 60, 20, 0.2)), None),
    "healthy, 16 users": (Run(own(64, 64, 60), concurrency=16), None),
    "healthy conversation": (Run(own(40, 40, 20, 0.05, 400)), None),
    "healthy, int8 keys": (Run(own(40, 100, 40), {"kv_dtype": "int8"}), None),
    "healthy, bounded gaps": (Run(BURSTS, {"max_num_batched_tokens": 2048, "max_itl_ratio": 3.0}, SMALL), None),
    "healthy, small model": (Run(own(150, 100, 100), {}, SMALL, concurrency=16), None),
}
CALIBRATIONS = ("calibration", "calibration, larger model")
plant(CALIBRATIONS[0])(lambda it: calibrated(it, {}, model=SMALL))
plant(CALIBRATIONS[1])(lambda it: calibrated(it, {"kv_dtype": "int8"}, {"quantize": None}, {}))
for _name, _runs in OPTIONS.items():
    plant(_name)(lambda it, runs=_runs: it.mended(*runs))


@plant("memory_slow")
def _memory_slow(it: Plant) -> Planted:
    os.sched_setaffinity(0, {0})
    asked = [replace(r, arrival_s=0.5 * (i // 2)) for i, r in enumerate(own(10, 300, 40))]
    run = Run(asked, {"num_threads": 1, "quantize": None})
    with use_cache(WIDE):
        if load_calibration(ceilings(find_native()).machine, 1) is None:
            calibrate(run, 1)
    return it.mended(replace(run, beside=lambda: processes(STREAM, 1)), run)


@plant("huge_pages")
def _huge_pages(it: Plant) -> Planted:
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, int(not it.without), 0, 0, 0)
    return it.mended(Run(own(16, 64, 60), {"pack_cache": False}))


@plant("throttled")
def _throttled(it: Plant) -> Planted:
    stat = "sys/fs/cgroup/cpu.stat"
    return of_system(
        it, {stat: "nr_throttled 1\nthrottled_usec 7\n"}, {stat: "nr_throttled 80\nthrottled_usec 2000000\n"}
    )


@plant("swap")
def _swap(it: Plant) -> Planted:
    counted, memory = "77 (python) S 1 -1 77 0 -1 4194560 5 0 {} 0 1 2 3 4 20 0\n", "proc/pressure/memory"
    files = {"proc/self/status": "Name:\tpython\nVmSwap:\t 0 kB\n", "proc/self/stat": counted.format(3)}
    after = {"proc/self/status": "Name:\tpython\nVmSwap:\t 250000 kB\n", "proc/self/stat": counted.format(90000)}
    return of_system(it, files | {memory: "some total=0\n"}, after | {memory: "some total=2000000\n"})


@plant("thermal")
def _thermal(it: Plant) -> Planted:
    cpu = "sys/devices/system/cpu/cpu0"
    events, clock = f"{cpu}/thermal_throttle/core_throttle_count", f"{cpu}/cpufreq/scaling_cur_freq"
    return of_system(it, {events: "4\n", clock: "3000000\n"}, {events: "90\n", clock: "1500000\n"})


@plant("numa")
def _numa(it: Plant) -> Planted:
    with use_cache(WIDE):
        _, recording = it.run(Run(MIXED))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {
            "proc/self/status": "Cpus_allowed_list:\t0-3\n",
            "proc/self/numa_maps": "7f00 default anon=90 N1=90 kernelpagesize_kB=4\n",
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
        }.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_text(text)
        record = np.full(1, np.nan, list(AROUND_FIELDS))
        record["remote_share"] = remote_share(None, Path(folder))
        return it.found(doctor(replace(recording, around=record)))
