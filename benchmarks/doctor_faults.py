"""Plants 27 faults, one after the other, and asks the doctor: what it finds first, what it promises, what came of it.

usage: python -m benchmarks.doctor_faults [--calibrate] [--only NAME ...] [--cache FOLDER] [--threads N] [--out DIR]

Each fault is an engine in a process of its own, run on a workload with the fault and, where an option or other requests
mend it, once more without it. `gain` is what the doctor predicted of the first run, `realised` the ratio of the two
measurements. Healthy runs have names that begin with "healthy". `--cache` is a folder for a random model of 150 million
parameters, written at the first run, and for what `--calibrate` fits of the models on this machine, without which gains
are rough.
"""

import argparse
import json
import os
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
    """Plant a fault; where the doctor says what mends it, run without it too."""
    found = in_a_process(name, options)
    if not found.right or found.effect not in found.measures:
        return found
    mended = in_a_process(name, options, "--without").measures
    return replace(found, realised=found.measures[found.effect] / mended[found.effect])


def show(report: DoctorReport) -> None:
    """Print a row for each fault."""
    table = Table("fault", "found first", "then", "evidence", "flag", "predicted", "realised", "off")
    for each in report.planted:
        gain, real = (f"{value:.2f}" if value else "" for value in (each.gain, each.realised))
        off = f"{each.gain / each.realised - 1:+.0%}" if each.gain and each.realised else ""
        first, *then = each.found or ["nothing"]
        mark = first if each.right else f"[red]{first}[/]"
        table.add_row(each.fault, mark, " ".join(then), each.evidence, each.flag, gain, real, off)
    console = Console(width=200)
    console.print(table)
    console.print(f"{sum(each.right for each in report.planted)} of {len(report.planted)} as they should be")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--calibrate", action="store_true", help="fit both models' ops first")
    parser.add_argument(
        "--only", nargs="*", choices=sorted(PLANTS), help="faults and healthy runs; none: only calibrate"
    )
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
        for name in CALIBRATIONS:
            assert in_a_process(name, options).right, "the machine could not be calibrated"
    names = [name for name in PLANTS if name not in CALIBRATIONS] if options.only is None else options.only
    planted = [both_ways(name, options) for name in names]
    report = DoctorReport(name="doctor-faults", num_threads=options.threads, planted=planted)
    show(report)
    if planted:
        save(options.out, report)


if __name__ == "__main__":
    main()
