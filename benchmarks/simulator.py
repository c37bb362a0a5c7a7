"""How far a simulated run is from the real one: the same requests at the same times, in one process here.

usage: python -m benchmarks.simulator [--model MODEL] [--azure FILE] [--mooncake FILE] [--load 0.7] [--out DIR]

Each trace's prompts are scaled and cut to the model's context, its outputs stay as long. Its first requests come at
once, which tells how fast this machine is beside the calibration; the others come in `--rounds` of two parts, the
engine anew for each, at times stretched until a simulation at that speed is busy for `--load` of the time. What the
first part took is what the second is predicted from. Three predictions stand beside each measurement: by the
calibration alone, made before; by the calibration with what is around ops as in the first part; and at the pace that
the first part had as well. Beside them stands what so few requests tell of a quantile, whoever predicts it: how far
that of 90 % of samples of them is from that of all. The recorded plans are replayed, and so are those of five other
runs: chunks and prefix hits, preemption, priorities, forks and lookup drafts. A thousand requests of 200 tokens are
simulated, on the clock of the processor.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from benchmarks.common import calibrate, option_parser, save
from rich.console import Console
from rich.table import Table

from ridgeline.bench.arrivals import Arrivals, greedy_requests
from ridgeline.bench.metrics import Results, summarize
from ridgeline.bench.record import RunLog
from ridgeline.bench.report import Report
from ridgeline.bench.workload import BenchRequest, random_tokens
from ridgeline.bench.workloads import parse_workload
from ridgeline.core.config import EngineConfig
from ridgeline.core.params import SamplingParams
from ridgeline.engine.build import build_engine
from ridgeline.engine.recording import Recording, read_recording
from ridgeline.explain.machine import SimulatedMachine, simulated_machine
from ridgeline.explain.pace import RecordedPace
from ridgeline.explain.replaying import Replay, replay
from ridgeline.explain.simulation import run_simulated

LATENCIES = tuple((name, quantile) for name in ("ttft_ms", "tpot_ms") for quantile in ("p50", "p99"))
Part = list[BenchRequest]
WAYS = ("calibrated", "fitted", "paced")
NUM_SAMPLES = 400
STRETCH_ROUNDS = 3  # which come within a few percent
NUM_RECORDED, SHARED = 80, random_tokens(7, 0, 96, 400)
RECORDED: Mapping[str, tuple[dict[str, object], dict[str, object]]] = {  # options of the engine, and of all requests
    "chunks and prefix hits": ({"max_num_batched_tokens": 48, "max_num_seqs": 8}, {"temperature": 0}),
    "preemption": ({"kv_cache_bytes": 1 << 20, "max_num_seqs": 16}, {"temperature": 0}),
    "priorities": ({"scheduling_policy": "priority", "kv_cache_bytes": 1 << 20}, {"temperature": 0}),
    "forks": ({"max_num_seqs": 12}, {"temperature": 1, "n": 3}),
    "lookup drafts": ({"speculate": "ngram", "adaptive_speculation": False}, {"temperature": 0}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A recorded run, and how many of its plans came out the same again."""

    run: str
    num_requests: int
    num_steps: int
    num_equal: int
    num_preemptions: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The second parts of one trace, run and predicted: `errors` are predicted ÷ measured − 1, by way and latency.

    `latencies_ms` has the values; those of all rounds are taken together. `repeated` is the first parts as a prediction
    of the second ones: what a machine that varies leaves to no model. Errors of steps are without sign. `sampled`: the
    5 % and 95 % quantiles of a latency over samples, with replacement, of the measured requests, as errors are.
    """

    trace: str
    num_requests: int
    measured_load: float
    latencies_ms: dict[str, dict[str, float]]
    errors: dict[str, dict[str, float]]
    sampled: dict[str, tuple[float, float]]
    num_steps: int
    step_error_median: dict[str, float]
    step_error_p90: dict[str, float]
    plans: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorReport(Report):
    """All of one model. `simulated_cpu_s` is the median time to simulate `simulated_requests`."""

    model: str
    load: float
    rounds: int
    provenance: str
    unfitted: list[str]
    comparisons: list[Comparison]
    replays: list[Replayed]
    simulated_requests: int
    simulated_steps: int
    simulated_cpu_s: float


def requests_of(kind: str, path: Path, options: argparse.Namespace, machine: SimulatedMachine) -> list[Part]:
    """The trace's requests in parts, cut to the context, at times that keep the machine busy for a share of the time.

    How fast it is beside the calibration is measured, with the requests of one part at once.
    """
    num_parts, context = 2 * options.rounds + 1, machine.setup.max_model_len
    scaled, whole = (
        parse_workload(f"{kind}:path={path},num_requests={options.num_requests},length_scale={scale}").requests()
        for scale in (options.scale, 1.0)
    )
    cut = [
        replace(request, prompt=request.prompt[: context * 3 // 4], max_tokens=min(as_it_was.max_tokens, context // 4))
        for request, as_it_was in zip(scaled, whole, strict=True)
    ]
    size = len(cut) // num_parts
    parts = [cut[size * i : size * (i + 1)] for i in range(num_parts)]
    at_once = at_times(parts[0], 0.0)
    log, _ = run(machine.setup.config, at_once)
    slowness = log.duration_s / run_simulated(machine, at_once).log.duration_s
    return [stretched(at_times(part, 1.0), machine, options.load, slowness) for part in parts[1:]]


def at_times(part: Part, stretch: float) -> Part:
    """The requests at so many times their distance from the first."""
    return [replace(each, arrival_s=stretch * (each.arrival_s - part[0].arrival_s)) for each in part]


def stretched(part: Part, machine: SimulatedMachine, share: float, slowness: float) -> Part:
    """The requests at times at which steps so much slower than predicted keep the machine busy for a share of them."""
    stretch = slowness * run_simulated(machine, at_times(part, 0.0)).log.duration_s / part[-1].arrival_s / share
    for _ in range(STRETCH_ROUNDS):
        found = run_simulated(machine, at_times(part, stretch), pace=lambda _, seconds: slowness * seconds)
        stretch *= found.busy_share / share
    return at_times(part, stretch)


def run(config: EngineConfig, requests: Sequence[BenchRequest]) -> tuple[RunLog, Recording]:
    """Run the requests, after one that warms up."""
    arrivals = Arrivals()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        engine = build_engine(replace(config, journal=str(journal)), arrivals.deliver)
        arrivals.run(engine.loop, greedy_requests([BenchRequest(prompt=[5] * 32, max_tokens=8)], run=1))
        log = arrivals.run(engine.loop, greedy_requests(requests))
        engine.loop.close()
        return log, read_recording(journal)


class _Round:
    """One part that is fitted, the part after it, and what the ways predict of that."""

    def __init__(self, machine: SimulatedMachine, config: EngineConfig, parts: Sequence[Part]) -> None:
        first, second = parts
        self.fitted_log, before = run(config, first)
        self.log, self.recording = run(config, second)
        fitted = replace(machine, step_time=machine.step_time.fitted(before.timed(), with_ops=True))
        self.machines = {"calibrated": machine, "fitted": fitted}
        self.logs = {name: run_simulated(each, second).log for name, each in self.machines.items()}
        self.logs["paced"] = run_simulated(fitted, second, pace=RecordedPace(fitted, before)).log
        busy_s = sum(seconds for _, _, seconds in self.recording.timed())
        self.load = busy_s / self.log.duration_s

    def step_errors(self, way: str) -> list[float]:
        """How far each step of the second part was off."""
        seconds = self.machines[way].step_time.seconds
        timed = list(self.recording.timed())[16:]
        return [abs(seconds(load, behind) / took_s - 1) for load, behind, took_s in timed]


def joined(logs: Sequence[RunLog]) -> Results:
    """Results of runs one after the other."""
    records = [record for log in logs for record in log.records]
    return summarize(RunLog(records=records, duration_s=sum(log.duration_s for log in logs), unsent=0))


def sampled(logs: Sequence[RunLog]) -> dict[str, tuple[float, float]]:
    """How far a latency of as many of the requests, chosen at random with replacement, is from that of all."""
    random, found = np.random.default_rng(0), dict[str, tuple[float, float]]()
    for latency, quantile in LATENCIES:
        told = (getattr(record, latency.replace("_ms", "_s")) for log in logs for record in log.records)
        seconds_N = np.array([seconds for seconds in told if seconds is not None])
        share = float(quantile.removeprefix("p")) / 100
        chosen = [np.quantile(random.choice(seconds_N, len(seconds_N)), share) for _ in range(NUM_SAMPLES)]
        low, high = np.quantile(chosen, (0.05, 0.95)) / np.quantile(seconds_N, share) - 1
        found[f"{latency} {quantile}"] = float(low), float(high)
    return found


def compare(name: str, machine: SimulatedMachine, parts: Sequence[Part], config: EngineConfig) -> Comparison:
    """Run parts of a trace in turn, and put what was predicted beside what was measured."""
    rounds = [_Round(machine, config, parts[i : i + 2]) for i in range(0, len(parts), 2)]
    logs = {way: [each.logs[way] for each in rounds] for way in WAYS}
    logs |= {"repeated": [each.fitted_log for each in rounds], "measured": [each.log for each in rounds]}
    found = {way: joined(each).latencies for way, each in logs.items()}
    values = {
        way: {f"{latency} {q}": getattr(getattr(each, latency), q) for latency, q in LATENCIES}
        for way, each in found.items()
    }
    measured = values["measured"]
    errors = {
        way: {key: value / measured[key] - 1 for key, value in each.items()}
        for way, each in values.items()
        if way != "measured"
    }
    of_steps = {way: [error for each in rounds for error in each.step_errors(way)] for way in WAYS[:2]}
    replays = [replay(each.recording) for each in rounds]
    return Comparison(
        trace=name,
        num_requests=sum(len(part) for part in parts[1::2]),
        measured_load=float(np.mean([each.load for each in rounds])),
        latencies_ms=values,
        errors=errors,
        sampled=sampled(logs["measured"]),
        num_steps=len(of_steps[WAYS[0]]),
        step_error_median={way: float(np.quantile(each, 0.5)) for way, each in of_steps.items()},
        step_error_p90={way: float(np.quantile(each, 0.9)) for way, each in of_steps.items()},
        plans="; ".join(each.sentence for each in replays),
    )


def recorded(model: str, threads: int, name: str, seed: int) -> Replayed:
    """Run requests that come between steps, and compute every plan again."""
    options, params = RECORDED[name]
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        config = EngineConfig.of(model, num_threads=threads, tuning="default", max_model_len=512, **options)
        engine = build_engine(replace(config, journal=str(journal)), lambda deltas: None)
        for number in range(NUM_RECORDED):
            prompt = random_tokens(5, 100 * seed + number, int(random.integers(1, 160)), 400)
            shared = SHARED[: int(random.integers(0, 96))] if number % 2 else []
            wanted = SamplingParams(max_tokens=int(random.integers(1, 80)), seed=number, ignore_eos=True, **params)
            request = engine.intake.request(shared + prompt, wanted, priority=number % 3)
            engine.loop.submit(replace(request, client=number % 2))
            for _ in range(int(random.integers(0, 8))):
                engine.loop.step()
        while engine.loop.step():
            pass
        engine.loop.close()
        recording = read_recording(journal)
    found: Replay = replay(recording)
    return Replayed(
        run=name,
        num_requests=found.num_requests,
        num_steps=found.num_steps,
        num_equal=found.num_equal,
        num_preemptions=int((recording.decisions["kind"] == 1).sum()),
        cached_tokens=int(recording.outputs["num_cached"].sum()),
    )


def simulated(machine: SimulatedMachine, count: int) -> tuple[int, float]:
    """Simulate requests of 200 tokens that keep about 32 running: the steps, and the median seconds of three times."""
    asked = [BenchRequest(prompt=random_tokens(5, n, 64, 400), max_tokens=136, arrival_s=0.0) for n in range(count)]
    times: list[float] = []
    for _ in range(3):
        started = time.process_time()
        found = run_simulated(machine, asked, max_concurrency=32)
        times.append(time.process_time() - started)
    return found.num_steps, median(times)


def show(report: SimulatorReport) -> None:
    """Print a row for each latency of each trace."""
    columns = ("measured, ms", *(f"{way}, error" for way in (*WAYS, "repeated")), "sampled, 90 %")
    table = Table("trace", "latency", *columns, title=f"{report.model}, times are {report.provenance}")
    console = Console(width=160)
    for each in report.comparisons:
        for key, value in each.latencies_ms["measured"].items():
            errors = (f"{each.errors[way][key]:+.1%}" for way in (*WAYS, "repeated"))
            low, high = each.sampled[key]
            table.add_row(each.trace, key, f"{value:,.2f}", *errors, f"{low:+.0%} to {high:+.0%}")
    console.print(table)
    for each in report.comparisons:
        off = ", ".join(
            f"{way} {each.step_error_median[way]:.1%} and {each.step_error_p90[way]:.1%}" for way in WAYS[:2]
        )
        console.print(
            f"{each.trace}: busy {each.measured_load:.0%}; steps off by (p50, p90 of {each.num_steps:,}) {off}"
        )
        console.print(f"  {each.plans}")
    for each in report.replays:
        console.print(
            f"{each.run}: {each.num_equal:,} of {each.num_steps:,} plans of {each.num_requests} requests are the same, "
            f"{each.num_preemptions} preemptions, {each.cached_tokens:,} tokens cached"
        )
    console.print(
        f"{report.simulated_requests:,} requests of 200 tokens, {report.simulated_steps:,} steps: simulated in "
        f"{report.simulated_cpu_s:.2f} s"
    )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--azure", type=Path, help="azure2023_code.csv; without it this trace is left out")
    parser.add_argument("--mooncake", type=Path, help="mooncake_synthetic.jsonl; without it this trace is left out")
    parser.add_argument("--num-requests", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.1, help="of the trace's prompts")
    parser.add_argument("--load", type=float, default=0.7, help="share of the time that the machine is to be busy")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    options = parser.parse_args()
    traces = {name: path for name, path in (("azure", options.azure), ("mooncake", options.mooncake)) if path}
    config = EngineConfig.of(
        options.model, num_threads=options.threads, max_num_seqs=options.max_num_seqs, tuning="default"
    )
    if traces:
        calibrate(config)
    # What is known of the compared steps is told of them alone: requests at once are others, and hold more keys.
    machine, other = simulated_machine(config), simulated_machine(config)
    comparisons = [
        compare(name, machine, requests_of(name, path, options, other), config) for name, path in traces.items()
    ]
    replays = [recorded("python-1m", options.threads, name, seed) for seed, name in enumerate(RECORDED)]
    num_steps, cpu_s = simulated(other, 1000)
    report = SimulatorReport(
        name=f"simulator-{Path(options.model).name}",
        model=options.model,
        load=options.load,
        rounds=options.rounds,
        provenance=machine.provenance,
        unfitted=sorted(machine.step_time.unfitted),
        comparisons=comparisons,
        replays=replays,
        simulated_requests=1000,
        simulated_steps=num_steps,
        simulated_cpu_s=cpu_s,
    )
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
