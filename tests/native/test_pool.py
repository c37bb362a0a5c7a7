"""The thread pool where the system does not cooperate: busy cores, stopped processes, forks, an exiting interpreter.

Only the idle test looks at a clock. Everything else asks for the same numbers as in calm, and for an end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ridgeline._native", reason="the native module is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
from native_steps import CONTEXT, Doubler, native, schedule, step
from tiny_models import build

from ridgeline import _native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinities and thread ids are Linux's")

TIMEOUT_S = 120
GENERATE = """
import gc, os, signal, sys, threading, time
from ridgeline import LLM, SamplingParams

def build():
    return LLM("python-1m", backend="native", num_threads=3, pack_cache=False, max_model_len=512, max_num_seqs=4)

def generate(max_tokens=60):
    params = SamplingParams(max_tokens=max_tokens, temperature=1, seed=1, ignore_eos=True)
    outputs = llm.generate(["def f(", "class A", "import "], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]

llm = build()
"""


def python(code: str, before: str = "") -> subprocess.Popen[str]:
    """An interpreter of its own that runs `before`, GENERATE and `code`."""
    command = [sys.executable, "-c", before + GENERATE + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], status: int = 0, told: str = "") -> str:
    """What the process prints, once it has ended with `status` and said `told` on the way."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status, err
    assert told in err
    return out


def thread_ids() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@contextlib.contextmanager
def on_one_busy_core():
    """A core that another process keeps busy, with this thread and the threads that it starts on that core alone."""
    before = os.sched_getaffinity(0)
    core = min(before)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(other.pid, {core})
        os.sched_setaffinity(0, {core})
        yield
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build("qwen3", 1, tmp_path_factory.mktemp("qwen3"))


def executable_of(model, threads):
    return native(model.lowered(CONTEXT), model.weights, _native.best_level(), num_threads=threads, deterministic=True)


def logits(model, executable, rounds=1):
    """Of every token of three sequences, computed in a random schedule; the same for any number of threads."""
    program = model.lowered(CONTEXT)
    ids = np.random.default_rng(5).integers(0, model.spec.vocab_size, (3, CONTEXT - 2))
    out = torch.zeros(*ids.shape, program.vocab_size)
    for seed in range(rounds):
        for spans in schedule(ids, np.random.default_rng(seed)):
            rows = torch.from_numpy(executable.run(step(program, spans)).logits_RV)
            for s, start, span in spans:
                out[s, start : start + len(span)] = rows[: len(span)]
                rows = rows[len(span) :]
    return out


@pytest.fixture(scope="module")
def expected(model):
    return logits(model, executable_of(model, 1))


def test_an_idle_pool_uses_no_processor_time():
    code = """
generate()
time.sleep(0.1)
before = time.process_time()  # of all threads
time.sleep(1)
print(time.process_time() - before)
"""
    assert float(finish(python(code))) < 0.02


def test_torch_leaves_the_cores_to_the_pool():
    assert finish(python("import torch; print(torch.get_num_threads())")).split() == ["1"]


def test_a_stopped_process_goes_on_as_if_nothing_had_been():
    code = "print('ready', flush=True)\nprint(generate(150))"
    calm = finish(python(code))
    process = python(code)
    stops = 0
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while process.poll() is None and stops < 40:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
        stops += 1
    assert stops > 1
    assert "ready\n" + finish(process) == calm


@pytest.mark.parametrize("hindrance", ["pinned to a busy core", "runs when nothing else does"])
def test_a_worker_that_hardly_runs(model, expected, hindrance):
    before = thread_ids()
    executable = executable_of(model, 3)
    worker = min(thread_ids() - before)
    with on_one_busy_core():
        (core,) = os.sched_getaffinity(0)
        os.sched_setaffinity(worker, {core})
        if hindrance == "runs when nothing else does":
            os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
        assert torch.equal(logits(model, executable), expected)


def test_more_threads_than_cores(model, expected):
    threads = 2 * len(os.sched_getaffinity(0)) + 3
    assert torch.equal(logits(model, executable_of(model, threads), rounds=3), expected)


def test_three_threads_on_one_busy_core(model, expected):
    with on_one_busy_core():
        executable = executable_of(model, 3)
        assert torch.equal(logits(model, executable), expected)


def test_two_pools_at_once(model, expected):
    results = {}

    def work(name):
        results[name] = logits(model, executable_of(model, 2), rounds=5)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [torch.equal(results[name], expected) for name in range(2)] == [True, True]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_hundred_thousand_tiny_steps(threads):
    """As many of them as the machine does in a few seconds."""
    tape, end = Doubler(_native.Pool(threads)), time.monotonic() + 5
    rng = np.random.default_rng(threads)
    steps = [rng.integers(0, 8, size) for size in (1, 2, 3, 1, 7, 1, 5)]
    for done in range(100_000):
        assert tape.is_right(steps[done % len(steps)])
        if time.monotonic() > end:
            break


def test_tapes_of_one_pool_take_turns():
    pool, wrong = _native.Pool(2), []

    def work(name):
        tape = Doubler(pool)
        wrong.extend(i for i in range(2000) if not tape.is_right([name, i % 8]))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_pools_come_and_go():
    before = thread_ids()  # some may belong to pools of earlier tests that are still to go
    for threads in range(1, 40):
        pool = _native.Pool(threads)
        if threads % 2:
            assert Doubler(pool).is_right([1, 2])
        del pool
    assert thread_ids() <= before


@pytest.mark.parametrize("threads", [0, -3, 4097])
def test_a_wrong_number_of_threads_is_refused(threads):
    with pytest.raises(ValueError, match=f"1 to 4096 threads, not {threads}"):
        _native.Pool(threads)


def test_threads_that_the_system_refuses():
    code = """
import resource
from ridgeline import _native
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)  # room for few stacks
try:
    _native.Pool(1000)
except RuntimeError as error:
    print(error)
generate()
"""
    assert "of 1000 threads" in finish(python(code))


INTERRUPT = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background ignores it
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
while True:
    generate(100)
"""
DAEMON = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
from native_steps import Doubler
from ridgeline import _native
def forever():
    tape, many = Doubler(_native.Pool(2)), [1] * 100_000
    while True:
        tape.is_right(many)
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3)
"""
SERVER = """
import asyncio
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.thread_engine import ThreadEngine

async def serve():
    engine = ThreadEngine(EngineConfig(model=ModelConfig(model="python-1m", max_model_len=512), num_threads=2))
    engine.start()
    params = SamplingParams(max_tokens=500, temperature=1, ignore_eos=True, n=8)
    async for _ in engine.stream(engine.engine.intake.request([1], params)):
        sys.exit(3)
asyncio.run(serve())
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("generate(); sys.exit(3)", 3),
        ("generate(); raise ValueError('a mistake')", 1),
        (INTERRUPT, -signal.SIGINT),
        (DAEMON, 0),
        (SERVER, 3),
    ],
    ids=["exit", "error", "interrupt", "within a step", "serving"],
)
def test_the_process_ends_cleanly(ending, status):
    """With a live pool, and with steps under way in threads for which Python does not wait."""
    finish(python(ending), status)


def test_the_exiting_thread_may_compute():
    """Exit handlers run last in, first out: this one after the native module's, which sends other threads to sleep."""
    code = "expected = generate()" + DAEMON
    before = "import atexit\natexit.register(lambda: print(generate() == expected))"
    assert finish(python(code, before)) == "True\n"


def test_an_engine_serves_one_thread_at_a_time():
    """And says so: two steps on the same buffers would spoil each other, or worse."""
    tape, told, end = Doubler(_native.Pool(2)), [], time.monotonic() + TIMEOUT_S
    many = np.zeros(100_000, dtype=np.int64)

    def until_told():
        while not told and time.monotonic() < end:
            try:
                tape.run(many)
            except RuntimeError as error:
                told.append(str(error))

    threads = [threading.Thread(target=until_told) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert "one thread at a time" in told[0]
    assert tape.is_right([1, 2, 3])


def test_a_forked_process_is_told_and_ends():
    code = """
expected = generate()
child = os.fork()
if child == 0:
    assert generate() != expected  # fails, and is logged
    del llm
    gc.collect()
    llm = build()
    sys.exit(7 if generate() == expected else 8)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), generate() == expected)
"""
    assert finish(python(code), told="build the engine after the fork") == "7 True\n"


SHARE = """
import os, subprocess, sys, time
import numpy as np
from ridgeline import _native

def core_of(thread):
    return int(open(f"/proc/self/task/{thread}/stat").read().rsplit(")", 1)[1].split()[36])

usable, apart = os.sched_getaffinity(0), 0
here, *others = sorted(usable)
threads = set(os.listdir("/proc/self/task"))
pool = _native.Pool(2)
(worker,) = [int(each) for each in set(os.listdir("/proc/self/task")) - threads]
data = np.zeros(2**17, np.uint8)
part = (data.ctypes.data + 63) // 64 * 64, 2**16  # address, bytes
spin = "import os, sys\\nos.sched_setaffinity(0, {int(sys.argv[1])})\\nwhile True: pass"
busy = [subprocess.Popen([sys.executable, "-c", spin, str(core)]) for core in others]
try:
    os.sched_setaffinity(0, {here})
    time.sleep(0.3)  # until they are
    for _ in range(10):
        os.sched_setaffinity(worker, {here})
        os.sched_setaffinity(worker, usable)
        for _ in range(20):
            _native.read_all("portable", pool, *part)
        apart += core_of(worker) != here
        assert os.sched_getaffinity(worker) == usable
finally:
    for process in busy:
        process.kill()
print(apart)
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_workers_leave_a_core_that_they_share():
    """Where all other cores are busy the system leaves them on one, in turns: they part, and are bound to none."""
    found = subprocess.run([sys.executable, "-c", SHARE], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert int(found.stdout or -1) > 5, found
