"""How far a simulated run is from the real one: the same requests at the same times, in one process here.

The machine is calibrated for the model first. Each trace is cut to the model's context and sent at `--load` of the
capacity that the simulator finds; then latencies are put side by side, and the plans of the run are replayed.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles

from benchmarks.common import calibrate, option_parser, save, step_seconds
from rich.console import Console
from rich.table import Table

from ridgeline.bench.arrivals import Arrivals, greedy_requests
from ridgeline.bench.metrics import Results, summarize
from ridgeline.bench.report import Report
from ridgeline.bench.workload import BenchRequest
from ridgeline.bench.workloads import parse_workload
from ridgeline.core.config import EngineConfig
from ridgeline.engine.build import build_engine
from ridgeline.engine.priced import load_of
from ridgeline.engine.recording import Recording, read_recording
from ridgeline.explain.machine import SimulatedMachine, simulated_machine
from ridgeline.explain.replaying import replay
from ridgeline.explain.simulation import run_simulated

LATENCIES = tuple((name, quantile) for name in ("ttft_ms", "tpot_ms") for quantile in ("p50", "p99"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One trace, simulated and run. Errors are simulated ÷ measured − 1; those of steps without sign."""

    trace: str
    simulated: Results
    measured: Results
    errors: dict[str, float]
    num_steps: int
    step_error_median: float
    step_error_p90: float
    simulation_cpu_s: float
    plans: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorReport(Report):
    """All traces of one model."""

    model: str
    load: float
    provenance: str
    unfitted: list[str]
    comparisons: list[Comparison]


def requests_of(kind: str, path: Path, options: argparse.Namespace, machine: SimulatedMachine) -> list[BenchRequest]:
    """The trace's requests, cut to the context, at times stretched to the share of the capacity."""
    context = machine.setup.max_model_len
    workload = parse_workload(f"{kind}:path={path},num_requests={options.num_requests},length_scale={options.scale}")
    cut = [
        replace(request, prompt=request.prompt[: context * 3 // 4], max_tokens=min(request.max_tokens, context // 4))
        for request in workload.requests()
    ]
    at_once = run_simulated(machine, [replace(request, arrival_s=0.0) for request in cut])
    stretch = at_once.results.duration_s / options.load / (cut[-1].arrival_s or 1.0)
    return [replace(request, arrival_s=request.arrival_s * stretch) for request in cut]


def run(config: EngineConfig, requests: list[BenchRequest], journal: Path) -> tuple[Results, Recording]:
    """Run the requests, after one that warms up."""
    arrivals = Arrivals()
    engine = build_engine(replace(config, journal=str(journal)), arrivals.deliver)
    arrivals.run(engine.loop, greedy_requests([BenchRequest(prompt=[5] * 32, max_tokens=8)], run=1))
    log = arrivals.run(engine.loop, greedy_requests(requests))
    engine.loop.close()
    return summarize(log), read_recording(journal)


def compare(name: str, machine: SimulatedMachine, requests: list[BenchRequest], config: EngineConfig) -> Comparison:
    """Simulate, run, and put the figures side by side."""
    started = time.process_time()
    simulated = run_simulated(machine, requests).results
    cpu_s = time.process_time() - started
    with tempfile.TemporaryDirectory() as folder:
        measured, recording = run(config, requests, Path(folder) / "journal")
    errors = {}
    for latency, quantile in LATENCIES:
        one, other = (getattr(getattr(each.latencies, latency), quantile) for each in (simulated, measured))
        errors[f"{latency} {quantile}"] = one / other - 1
    pairs = zip(recording.steps[16:], step_seconds(recording)[16:])
    seconds = machine.step_time.seconds
    off = [abs(seconds(load_of(recording.spans_of(s)), is_anew=not s["span_shift"]) / took - 1) for s, took in pairs]
    deciles = quantiles(off, n=10)
    return Comparison(
        trace=name,
        simulated=simulated,
        measured=measured,
        errors=errors,
        num_steps=len(off),
        step_error_median=deciles[4],
        step_error_p90=deciles[8],
        simulation_cpu_s=cpu_s,
        plans=replay(recording).sentence,
    )


def show(report: SimulatorReport) -> None:
    """Print a row for each latency of each trace."""
    table = Table(
        "trace",
        "latency",
        "simulated, ms",
        "measured, ms",
        "error",
        title=f"{report.model}, times are {report.provenance}",
    )
    for each in report.comparisons:
        for latency, quantile in LATENCIES:
            pair = [getattr(getattr(side.latencies, latency), quantile) for side in (each.simulated, each.measured)]
            name = f"{latency.removesuffix('_ms').upper()} {quantile}"
            table.add_row(each.trace, name, *(f"{value:,.2f}" for value in pair), f"{pair[0] / pair[1] - 1:+.1%}")
    console = Console()
    console.print(table)
    for each in report.comparisons:
        console.print(
            f"{each.trace}: {each.plans}; step time off by {each.step_error_median:.1%} at the median of "
            f"{each.num_steps:,} steps, {each.step_error_p90:.1%} at the 90th percentile; "
            f"simulated in {each.simulation_cpu_s:.2f} s of CPU"
        )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--azure", type=Path, help="azure2023_code.csv")
    parser.add_argument("--mooncake", type=Path, help="mooncake_synthetic.jsonl")
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--scale", type=float, default=0.1, help="of the trace's lengths")
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity that the simulator finds")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    options = parser.parse_args()
    traces = {name: path for name, path in (("azure", options.azure), ("mooncake", options.mooncake)) if path}
    if not traces:
        parser.error("give --azure FILE, --mooncake FILE or both")
    config = EngineConfig.of(
        options.model, num_threads=options.threads, max_num_seqs=options.max_num_seqs, tuning="default"
    )
    calibrate(config)
    machine = simulated_machine(config)
    comparisons = [
        compare(name, machine, requests_of(name, path, options, machine), config) for name, path in traces.items()
    ]
    report = SimulatorReport(
        name="simulator",
        model=options.model,
        load=options.load,
        provenance=machine.provenance,
        unfitted=sorted(machine.step_time.unfitted),
        comparisons=comparisons,
    )
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
