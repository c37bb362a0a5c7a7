"""What is planted: for each fault a run with it, and one without; healthy runs too. For `doctor_faults.py`."""

import ctypes
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
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
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.explain.diagnosis import Diagnosis, doctor
from ridgeline.explain.rules import Finding
from ridgeline.server.app import create_app
from ridgeline.server.run import DrainingServer
from ridgeline.server.settings import ServerSettings

SMALL, WIDE = "python-9m", "RIDGELINE_WIDE"  # a bundled model, and the variable with the folder of a larger one
BLOCK = 32
PR_SET_THP_DISABLE, MADV_PAGEOUT = 41, 21
SPIN = "while True: pass"
STREAM = """
import os
from ridgeline import _native
os.sched_setaffinity(0, {1})
while True:
    _native.read_bandwidth(_native.best_level(), 1, 2**28, 50)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """What was found; `realised` is what the change did, by the measure that the first finding has."""

    fault: str
    found: list[str]
    right: bool
    sentence: str = ""
    evidence: str = ""
    flag: str = ""
    gain: float | None = None
    provenance: str = ""
    effect: str = ""
    realised: float | None = None
    match: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Requests, and the engine that gets them; `beside` is there while it runs."""

    requests: list[BenchRequest]
    options: Mapping[str, object] = field(default_factory=dict)
    model: str = SMALL
    concurrency: int | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    beside: Callable[[], Any] = nullcontext
    read_host: Callable[[], Any] | None = None

    def config(self, threads: int) -> EngineConfig:
        base = {"dtype": "bfloat16", "quantize": "int8", "num_threads": threads, "tuning": "default"}
        model = os.environ[WIDE] if self.model == WIDE else self.model
        return EngineConfig.of(model, **base | dict(self.options))


class Plant:
    """Runs engines in this process."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads

    def run(self, run: Run) -> tuple[Results, Recording]:
        """Run the requests, after one that warms up."""
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
            arrivals.run(engine.loop, greedy_requests([BenchRequest(prompt=[5] * 32, max_tokens=8)], run=1))
            with run.beside():
                log = arrivals.run(engine.loop, requests, run.concurrency)
            engine.loop.close()
            return summarize(log), read_recording(path)

    def mended(self, fault: Run, without: Run | None = None) -> Planted:
        """Plant a fault, ask the doctor, and run without it where it can be mended."""
        was, recording = self.run(fault)
        found = self.found(doctor(recording))
        if without is None or not found.effect:
            return found
        now, _ = self.run(without)
        return replace(found, realised=_measure(was, found.effect) / _measure(now, found.effect))

    def found(self, diagnosis: Diagnosis) -> Planted:
        """Return what was found."""
        ids = [each.id for each in diagnosis.findings]
        healthy = self.name.startswith("healthy")
        planted = Planted(fault=self.name, found=ids, right=not ids if healthy else ids[:1] == [self.name])
        planted = replace(planted, sentence=diagnosis.sentence, match=diagnosis.match)
        if not ids:
            return planted
        first = diagnosis.findings[0]
        told = {name: getattr(first, name) for name in ("evidence", "flag", "gain", "provenance", "effect")}
        return replace(planted, **told)


def _measure(results: Results, effect: str) -> float:
    if effect.startswith("more tokens"):
        return results.duration_s
    found = results.latencies
    return found.itl_ms.p99 if "gaps" in effect else found.e2el_ms.mean


def own(count: int, prompt: int, output: int, gap_s: float = 0.0, shared: int = 0) -> list[BenchRequest]:
    """Requests that have nothing in common but `shared` tokens at their beginning."""
    begin = random_tokens(7, 0, shared, 4000)
    prompts = (begin + random_tokens(5, number, prompt, 4000) for number in range(count))
    return [BenchRequest(prompt=each, max_tokens=output, arrival_s=i * gap_s) for i, each in enumerate(prompts)]


def calibrate(threads: int, runs: tuple[Run, ...] | None = None) -> None:
    """Fit the efficiencies of the models and formats that are run here."""
    wide = [Run([], options, WIDE) for options in ({}, {"quantize": None}, {"kv_dtype": "int8"})]
    for run in runs or (Run([]), *wide):
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

        return it.mended(Run(own(600, 100, 100), read_host=read))


PLANTS: dict[str, Callable[[Plant], Planted]] = {}


def plant(name: str) -> Callable[[Callable[[Plant], Planted]], Callable[[Plant], Planted]]:
    """Name what plants a fault."""

    def register(function: Callable[[Plant], Planted]) -> Callable[[Plant], Planted]:
        PLANTS[name] = function
        return function

    return register


MIXED = own(160, 100, 100)
STORM = own(96, 40, 300)
TURNS = [BenchRequest(prompt=random_tokens(5, n % 8, 800, 4000), max_tokens=4, arrival_s=0.06 * n) for n in range(80)]
BURSTS = [replace(each, arrival_s=0.6 * (n // 12)) for n, each in enumerate(own(96, 800, 150))]
TIMES = [random_tokens(5, n, BLOCK, 4000) for n in range(120)]
COMMON = random_tokens(7, 0, 768, 4000)
STAMPED = [BenchRequest(prompt=time + COMMON, max_tokens=4) for time in TIMES]
SORTED = [BenchRequest(prompt=COMMON + time, max_tokens=4) for time in TIMES]
LONG = [BenchRequest(prompt=random_tokens(7, 0, 3000, 4000), max_tokens=60, arrival_s=5.0 * (n > 0)) for n in range(9)]
KV = 81920  # bytes of a block of SMALL
OPTIONS: Mapping[str, tuple[Run, Run | None]] = {
    "no_load": (Run(own(40, 100, 100), concurrency=1), Run(own(40, 100, 100), concurrency=16)),
    "slots": (Run(MIXED, {"max_num_seqs": 2}), Run(MIXED, {"max_num_seqs": 16})),
    "budget_low": (
        Run(own(60, 800, 4), {"max_num_batched_tokens": 16, "max_num_seqs": 16}),
        Run(own(60, 800, 4), {"max_num_batched_tokens": 512, "max_num_seqs": 16}),
    ),
    "prefill_stalls": (Run(BURSTS, {"max_num_batched_tokens": 8192}), Run(BURSTS, {"max_num_batched_tokens": 512})),
    "kv_full": (
        Run(own(96, 400, 50), {"kv_cache_bytes": KV * 32}),
        Run(own(96, 400, 50), {"kv_cache_bytes": KV * 128}),
    ),
    "preemption": (Run(STORM, {"kv_cache_bytes": KV * 40}), Run(STORM, {"kv_cache_bytes": KV * 160})),
    "prefix_off": (
        Run(own(120, 20, 4, 0.002, 800), {"enable_prefix_caching": False}),
        Run(own(120, 20, 4, 0.002, 800)),
    ),
    "prefix_differs": (Run(STAMPED), Run(SORTED)),
    "prefix_evicted": (Run(TURNS, {"kv_cache_bytes": KV * 60}), Run(TURNS, {"kv_cache_bytes": KV * 240})),
    "precision": (
        Run(own(8, 64, 60), {"dtype": "float32", "quantize": None}, WIDE),
        Run(own(8, 64, 60), {"quantize": None}, WIDE),
    ),
    "kv_precision": (Run(LONG, {}, WIDE), Run(LONG, {"kv_dtype": "int8"}, WIDE)),
    "draft_loses": (
        Run(
            own(64, 100, 200),
            {"speculate": "ngram", "adaptive_speculation": False, "prompt_lookup_min": 1, "max_num_seqs": 16},
            params={"temperature": 1.0},
        ),
        Run(own(64, 100, 200), {"max_num_seqs": 16}, params={"temperature": 1.0}),
    ),
    "isa": (Run(MIXED, {"isa": "avx2"}), Run(MIXED)),
    "threads_few": (Run(MIXED, {"num_threads": 1}), Run(MIXED)),
    "threads_many": (Run(MIXED, {"num_threads": 8}), Run(MIXED)),
    "no_native": (Run(own(16, 100, 40), {"backend": "reference"}), Run(own(16, 100, 40))),
    "stolen": (Run(own(300, 100, 100), beside=lambda: processes(SPIN, 2)), Run(own(300, 100, 100))),
    "page_faults": (Run(own(24, 64, 60), {}, WIDE, beside=paged_out), Run(own(24, 64, 60), {}, WIDE)),
    "sampling": (Run(own(64, 100, 60), params={"temperature": 0, "logprobs": 20}), Run(own(64, 100, 60))),
    "healthy burst": (Run(MIXED), None),
    "healthy, seldom asked": (Run(own(40, 100, 40, 0.1)), None),
    "healthy, 16 users": (Run(own(300, 100, 100), concurrency=16), None),
    "healthy conversation": (Run(own(200, 40, 40, 0.01, 400)), None),
    "healthy, int8 keys": (Run(own(200, 300, 100), {"kv_dtype": "int8"}), None),
    "healthy, bounded gaps": (Run(BURSTS, {"max_num_batched_tokens": 2048, "max_itl_ratio": 3.0}), None),
    "healthy, larger model": (Run(own(16, 100, 60), {}, WIDE), None),
}
for _name, _runs in OPTIONS.items():
    plant(_name)(lambda it, runs=_runs: it.mended(*runs))


@plant("memory_slow")
def _memory_slow(it: Plant) -> Planted:
    os.sched_setaffinity(0, {0})
    run = Run([replace(r, arrival_s=0.4 * (i // 2)) for i, r in enumerate(own(16, 500, 40))], {"num_threads": 1}, WIDE)
    if load_calibration(ceilings(find_native()).machine, 1) is None:
        calibrate(1, (run,))
    return it.mended(replace(run, beside=lambda: processes(STREAM, 1)), run)


@plant("huge_pages")
def _huge_pages(it: Plant) -> Planted:
    run, prctl = Run(own(16, 64, 60), {"pack_cache": False}, WIDE), ctypes.CDLL(None).prctl
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    was, recording = it.run(run)
    prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)
    found = it.found(doctor(recording))
    now, _ = it.run(run)
    return replace(found, realised=was.latencies.e2el_ms.mean / now.latencies.e2el_ms.mean)


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


class Blocking:
    """Middleware that computes on the event loop before each request."""

    def __init__(self, app: Any, blocked_s: float) -> None:
        self._app, self._blocked_s = app, blocked_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            time.sleep(self._blocked_s)
        await self._app(scope, receive, send)


@contextmanager
def served(it: Plant, blocked_s: float = 0.0) -> Iterator[int]:
    """Serve on a free port of the loopback; each request blocks the event loop for so long."""
    engine = ThreadEngine(Run([]).config(it.threads).served())
    app = create_app(engine, engine.tokenizer, ServerSettings())
    app.add_middleware(Blocking, blocked_s=blocked_s)
    listener, ready = socket.create_server(("127.0.0.1", 0)), threading.Event()
    server = DrainingServer(app, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    ready.wait()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(20)


def ask(port: int, count: int, workers: int = 4) -> float:
    """Send completions from a few clients; return their mean seconds."""
    body = {"model": SMALL, "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    def one(number: int) -> float:
        began_s = time.perf_counter()
        prompt = random_tokens(5, number, 60, 4000)
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body | {"prompt": prompt}, timeout=60)
        return time.perf_counter() - began_s

    with ThreadPoolExecutor(workers) as pool:
        return statistics.mean(pool.map(one, range(count)))


def asked(it: Plant, port: int) -> Planted:
    """Return what the server's own doctor says."""
    time.sleep(0.5)
    told = httpx.get(f"http://127.0.0.1:{port}/explain/doctor", timeout=90).json()["found"]
    findings = [Finding(**each) for each in told["findings"]]
    return it.found(Diagnosis(told["num_steps"], told["num_requests"], told["match"], findings, told["is_simulated"]))


@plant("loop_lag")
def _loop_lag(it: Plant) -> Planted:
    with served(it, blocked_s=0.05) as port:
        was_s = ask(port, 60)
        found = asked(it, port)
    with served(it) as port:
        return replace(found, realised=was_s / ask(port, 60))


def _read_slowly(port: int, pause_s: float) -> None:
    """Stream an answer with more bytes than buffers hold, and look at it once in a while."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        body = {"model": SMALL, "prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 16}
        text = json.dumps(body)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        )
        client.sendall(f"{head}\r\n\r\n{text}".encode())
        data = b""
        while b"[DONE]" not in data:
            data = data[-8:] + client.recv(2**16)
            time.sleep(pause_s)


@plant("client_slow")
def _client_slow(it: Plant) -> Planted:
    seconds = []
    for pause_s in (0.005, 0.0):
        with served(it) as port:
            began_s = time.perf_counter()
            _read_slowly(port, pause_s)
            seconds.append(time.perf_counter() - began_s)
            if pause_s:
                found = asked(it, port)
    return replace(found, realised=seconds[0] / seconds[1])
