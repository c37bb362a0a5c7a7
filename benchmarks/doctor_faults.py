"""Plants 27 faults, one after the other, and asks the doctor: what it finds first, what it promises, what came of it.

usage: python -m benchmarks.doctor_faults [--calibrate] [--group NAME | --only NAME ...] [--rounds N] [--cache FOLDER]
                                          [--threads N] [--out DIR]

Each fault is an engine in a process of its own, run on a workload with the fault and, where an option or other requests
mend it, once more without it: `--rounds` pairs of these in turn. `gain` is what the doctor predicted of the runs with
the fault, `realised` the ratio of the two measurements of a pair; both at the median. `rank` is the place of the fault
among the findings. Healthy runs have names that begin with "healthy"; of "users", each asks again as he is answered,
which three of the faults are planted for as well. `--cache` is a folder for a random model of 150
million parameters, written at the first run, and for what `--calibrate` fits of the models on this machine, without
which gains are rough. A group takes at most four minutes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import doctor_servers
from benchmarks.common import option_parser, save, write_random
from benchmarks.doctor_plants import CACHE, CALIBRATIONS, PLANTS, WIDE, Plant, Planted
from rich.console import Console
from rich.table import Table

from ridgeline.bench.report import Report

assert doctor_servers, "it has plants too"
HEADS = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
GROUPS = {
    "batching": ["no_load", "slots", "budget_low", "prefill_stalls", "kv_full", "preemption", "draft_loses"],
    "memory": ["prefix_off", "prefix_differs", "prefix_evicted", "precision", "kv_precision", "sampling"],
    "machine": ["no_native", "isa", "threads_few", "threads_many", "stolen", "page_faults", "memory_slow"],
    "users": [name for name in PLANTS if name.endswith("users") and not name.startswith("healthy")],
    "rest": ["huge_pages", "numa", "throttled", "swap", "thermal", "loop_lag", "client_slow"],
    "healthy": [name for name in PLANTS if name.startswith("healthy")],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport(Report):
    """All faults that were planted, in order."""

    num_threads: int
    planted: list[Planted]


def in_a_process(name: str, options: argparse.Namespace, *more: str) -> Planted:
    """Plant one fault, in a process of its own: what it does to itself ends with it."""
    line = [sys.executable, "-m", "benchmarks.doctor_faults", "--plant", name, f"--threads={options.threads}", *more]
    done = subprocess.run([*line, f"--cache={options.cache}"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return Planted(fault=name, found=[f"the run failed with exit code {done.returncode}"], right=False)
    return Planted(**json.loads(done.stdout.splitlines()[-1]))


def both_ways(name: str, options: argparse.Namespace) -> Planted:
    """Plant a fault, and run without it where something mends it, again and again; return the medians."""
    found: list[Planted] = []
    realised: list[float] = []
    for _ in range(options.rounds):
        found.append(in_a_process(name, options))
        if found[-1].effect in found[-1].measures:
            mended = in_a_process(name, options, "--without").measures
            realised.append(found[-1].measures[found[-1].effect] / mended[found[-1].effect])
        elif name.startswith("healthy") and not found[-1].right:
            break
    gains = [each.gain for each in found if each.gain is not None]
    typical = sorted(found, key=lambda each: each.rank or 99)[(len(found) - 1) // 2]
    gain, real = (statistics.median(values) if values else None for values in (gains, realised))
    return replace(typical, gain=gain, realised=real, gains=gains, ratios=realised)


def show(report: DoctorReport) -> None:
    """Print a row for each fault."""
    table = Table("fault", "rank", "found", "evidence", "change", "predicted", "realised", "ratio")
    for each in report.planted:
        gain, real = (f"{value:.2f}" if value else "unknown" for value in (each.gain, each.realised))
        ratio = f"{each.gain / each.realised:.2f}" if each.gain and each.realised else ""
        rank = "" if each.rank is None else f"{each.rank}" if each.right else f"[red]{each.rank}[/]"
        found = " ".join(each.found) if each.found else "nothing"
        table.add_row(each.fault, rank, found, each.evidence, each.flag, gain, real, ratio)
    console = Console(width=200)
    console.print(table)
    console.print(f"{sum(each.right for each in report.planted)} of {len(report.planted)} as they should be")
    off = [abs(each.gain / each.realised - 1) for each in report.planted if each.gain and each.realised]
    console.print(f"{sum(each <= 0.25 for each in off)} of {len(off)} realised gains within 25 % of the predicted")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--calibrate", action="store_true", help="fit both models' ops first")
    parser.add_argument(
        "--only", nargs="*", choices=sorted(PLANTS), help="faults and healthy runs; none: only calibrate"
    )
    parser.add_argument("--group", choices=sorted(GROUPS), help="a part of them")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs of each")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "ridgeline-doctor")
    parser.add_argument("--plant", choices=sorted(PLANTS), help=argparse.SUPPRESS)
    parser.add_argument("--without", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wide = options.cache / "model"
    os.environ[WIDE], os.environ[CACHE] = str(wide), str(options.cache)
    if options.plant is not None:
        planted = PLANTS[options.plant](Plant(options.plant, options.threads, without=options.without))
        print(json.dumps(asdict(planted)), flush=True)
        os._exit(0)  # servers and spinning neighbours have daemon threads
    if not (wide / "config.json").exists():
        write_random(wide, "LlamaForCausalLM", **HEADS)
    if options.calibrate:
        for name in ("small", "wide"):  # else what the machine could do on another day is taken for what it can
            shutil.rmtree(options.cache / name, ignore_errors=True)
        for name in CALIBRATIONS:
            assert in_a_process(name, options).right, "the machine could not be calibrated"
    names = [name for names in GROUPS.values() for name in names] if options.only is None else options.only
    names = GROUPS[options.group] if options.group is not None else names
    planted = [both_ways(name, options) for name in names]
    report = DoctorReport(name="doctor-faults", num_threads=options.threads, planted=planted)
    show(report)
    if planted:
        save(options.out, report)


if __name__ == "__main__":
    main()
