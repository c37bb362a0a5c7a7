"""What `deterministic=True` costs: the same work with and without, in pairs, in one run.

usage: python -m benchmarks.deterministic --model MODEL [--options '{"quantize": "int8"}'] [--pairs 5]

Two processes hold the model, one per mode, and are asked by turns; every second pair begins with the other one. That
outputs are bitwise the same, alone and in any batch, is not measured but tested: tests/engine/test_deterministic.py.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import RESULTS, option_parser, save
from benchmarks.peers import machine
from benchmarks.peers.report import CellFacts
from benchmarks.peers.systems import DRIVERS, Job, Worker
from benchmarks.peers.workload import Cell, PromptSource, measure
from rich.console import Console

from ridgeline.bench.report import Report
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder

MODES = {"free": False, "deterministic": True}
OWN_OPTIONS = {"model", "num_threads", "max_model_len", "max_num_seqs", "deterministic"}
MAX_NUM_SEQS = 16
TIMEOUT_S = 7200.0
CELLS = (
    Cell(name="prefill_512", kind="prefill", input_tokens=512),
    Cell(name="decode_b1", kind="decode", requests=1, input_tokens=16, output_tokens=32),
    Cell(name="decode_b16", kind="decode", requests=16, input_tokens=16, output_tokens=32),
    Cell(name="decode_b1_4k", kind="decode", requests=1, input_tokens=4096, output_tokens=32),
    Cell(name="decode_b16_1k", kind="decode", requests=16, input_tokens=1024, output_tokens=32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCost:
    """One cell: rates of every pair in tokens per second, and the ratios deterministic / free (1: no cost)."""

    cell: CellFacts
    free: list[float]
    deterministic: list[float]
    ratios: list[float]
    median_ratio: float
    min_ratio: float
    max_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterministicReport(Report):
    """All cells on one model. `steal_share` is the time that the hypervisor took from the run."""

    model: str
    options: dict[str, object]
    threads: int
    seed: int
    read_bandwidth_gb_per_s: list[float]  # before and after
    load_average: float  # of the minute before
    steal_share: float
    cells: list[CellCost]


def cost(cell: Cell, free: Sequence[float], deterministic: Sequence[float]) -> CellCost:
    """The cell's ratios; values of equal index are a pair."""
    ratios = [slow / fast for fast, slow in zip(free, deterministic, strict=True)]
    return CellCost(
        cell=cell.facts(),
        free=list(free),
        deterministic=list(deterministic),
        ratios=ratios,
        median_ratio=statistics.median(ratios),
        min_ratio=min(ratios),
        max_ratio=max(ratios),
    )


def run_pairs(
    workers: dict[str, Worker], cell: Cell, arguments: argparse.Namespace, vocab_size: int
) -> dict[str, list[float]]:
    """Mode -> the cell's value in every pair. Both of a pair get the same prompts."""
    values: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(arguments.pairs):
        for mode in reversed(MODES) if number % 2 else MODES:
            prompts = PromptSource(arguments.seed, number, cell, vocab_size)
            values[mode].append(measure(cell, workers[mode].ask, prompts))
    return values


def run(arguments: argparse.Namespace, cells: Sequence[Cell], console: Console) -> DeterministicReport:
    """Starts both processes, and measures in pairs every cell that the model's context has room for."""
    folder = ModelFolder.open(arguments.model)
    spec = read_spec(folder.config)
    cells = [cell for cell in cells if cell.max_model_len <= spec.max_positions]
    load, ticks = machine.load_average(), machine.cpu_times()
    stream_gb_per_s = [machine.read_bandwidth_gb_per_s(arguments.threads)]
    command = [sys.executable, str(DRIVERS / "run_ridgeline.py")]
    found: list[CellCost] = []
    with Worker(command, TIMEOUT_S) as free, Worker(command, TIMEOUT_S) as deterministic:
        workers = {"free": free, "deterministic": deterministic}
        for mode, worker in workers.items():
            job = Job(
                model=folder.path,
                threads=arguments.threads,
                max_model_len=max(cell.max_model_len for cell in cells),
                max_num_seqs=MAX_NUM_SEQS,
                options={**arguments.options, "deterministic": MODES[mode]},
            )
            worker.start(job)
        for cell in cells:
            found.append(cost(cell, **run_pairs(workers, cell, arguments, spec.vocab_size)))
            console.print(describe(found[-1]), highlight=False, soft_wrap=True)
    stream_gb_per_s.append(machine.read_bandwidth_gb_per_s(arguments.threads))
    return DeterministicReport(
        name=arguments.name,
        model=folder.path.resolve().name,
        options=arguments.options,
        threads=arguments.threads,
        seed=arguments.seed,
        read_bandwidth_gb_per_s=stream_gb_per_s,
        load_average=load,
        steal_share=machine.steal_share(ticks, machine.cpu_times()),
        cells=found,
    )


def describe(found: CellCost) -> str:
    """A line about one cell."""
    free, deterministic = statistics.median(found.free), statistics.median(found.deterministic)
    return (
        f"{found.cell.label}: {free:.1f} and {deterministic:.1f} {found.cell.unit}, "
        f"deterministic / free {found.median_ratio:.3f} ({found.min_ratio:.3f}–{found.max_ratio:.3f})"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the options, measures, prints and saves."""
    parser = option_parser(__doc__, out=RESULTS)
    parser.add_argument("--model", default="python-9m", help="folder or bundled model")
    parser.add_argument("--options", type=json.loads, default={}, help="keywords of LLM for both, as JSON")
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="default: all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="1/N of the tokens, to see that it works")
    parser.add_argument("--name", default="deterministic", help="part of the result's file name")
    arguments = parser.parse_args(argv)
    if not isinstance(arguments.options, dict):
        parser.error("--options must be a JSON object of keywords of LLM")
    if own := sorted(OWN_OPTIONS & arguments.options.keys()):
        parser.error(f"--options: {', '.join(own)}: set by the benchmark itself; leave it out")
    if min(arguments.pairs, arguments.threads, arguments.shrink) < 1:
        parser.error("pairs, threads and shrink must be at least 1")
    cells = [cell.shrunk(arguments.shrink) for cell in CELLS if cell.name in (arguments.cells or [cell.name])]
    save(arguments.out, run(arguments, cells, Console()))


if __name__ == "__main__":
    main()
