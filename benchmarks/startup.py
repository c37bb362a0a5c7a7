"""From the start of the process to the first token, phase by phase, and the memory that it takes at most.

usage: python -m benchmarks.startup --model DIR [--options '{"quantize": "int4"}'] [--repeats 5] [--cold]

Every start is a fresh process, asked for one token after a prompt of 16. The first start of a repeat finds no packed
weights and writes them, the second finds them; both find the model's files in the page cache. With --cold the first
one finds them on the disk alone, which is read once before to tell how long that takes. Random weights will do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, option_parser, save
from benchmarks.peers import machine
from rich.console import Console
from rich.table import Table

from ridgeline.bench.report import Report
from ridgeline.weights.folder import ModelFolder

KINDS = ("first", "second")
CHUNK_BYTES = 1 << 24
RSS_SHARE, RSS_MORE_BYTES = 1.15, 500_000_000  # of the packed weights, and for everything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One process, whose phases add up to the total. `kind`: first (packs weights) or second (finds them packed)."""

    kind: str
    repeat: int
    phases_s: dict[str, float]
    total_s: float
    peak_rss_bytes: int
    packed_bytes: int
    disk_s: float | None = None  # of reading the model's files alone, where this start found them on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSummary:
    """Medians over the repeats; the phases' do not quite add up. `rss_limit_bytes` is 1.15 x packed + 500 MB."""

    kind: str
    phases_s: dict[str, float]
    total_s: float
    min_total_s: float
    max_total_s: float
    peak_rss_bytes: int
    rss_limit_bytes: int
    disk_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupReport(Report):
    """All starts of one model."""

    model: str
    options: dict[str, object]
    threads: int
    load_average: float  # of the minute before
    steal_share: float
    read_bandwidth_gb_per_s: float
    summaries: list[KindSummary]
    starts: list[Start]


def summarize(kind: str, starts: Sequence[Start]) -> KindSummary:
    """The starts of one kind together; the memory is the most that any took."""
    chosen = [start for start in starts if start.kind == kind]
    totals_s = [start.total_s for start in chosen]
    disks_s = [start.disk_s for start in chosen if start.disk_s is not None]
    return KindSummary(
        kind=kind,
        phases_s={phase: statistics.median(start.phases_s[phase] for start in chosen) for phase in chosen[0].phases_s},
        total_s=statistics.median(totals_s),
        min_total_s=min(totals_s),
        max_total_s=max(totals_s),
        peak_rss_bytes=max(start.peak_rss_bytes for start in chosen),
        rss_limit_bytes=round(RSS_SHARE * chosen[0].packed_bytes) + RSS_MORE_BYTES,
        disk_s=statistics.median(disks_s) if disks_s else None,
    )


def read_from_disk(files: Sequence[Path]) -> float:
    """The time that the disk takes to read the files; the page cache has none of them before and after."""
    forget(files)
    begin = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK_BYTES):
                pass
    took_s = time.perf_counter() - begin
    forget(files)
    return took_s


def forget(files: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_start(arguments: argparse.Namespace, kind: str, repeat: int, cache: str) -> Start:
    """A fresh process whose packed weights are under `cache`."""
    disk_s = None
    if arguments.cold and kind == KINDS[0]:
        disk_s = read_from_disk(ModelFolder.open(arguments.model).weight_files())
    command = [sys.executable, str(Path(__file__).with_name("startup_child.py"))]
    command += [arguments.model, str(arguments.threads), json.dumps(arguments.options)]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    clock = repr(time.perf_counter())
    done = subprocess.run([*command, clock], stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"a start ended with exit code {done.returncode}; see its error above")
    return Start(kind=kind, repeat=repeat, disk_s=disk_s, **json.loads(done.stdout))


def measure(arguments: argparse.Namespace) -> StartupReport:
    """All repeats, each with a cache folder of its own."""
    load, ticks = machine.load_average(), machine.cpu_times()
    stream_gb_per_s = machine.read_bandwidth_gb_per_s(arguments.threads)
    starts: list[Start] = []
    for repeat in range(arguments.repeats):
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as cache:
            starts += [run_start(arguments, kind, repeat, cache) for kind in KINDS]
    return StartupReport(
        name=arguments.name,
        model=Path(arguments.model).name,
        options=arguments.options,
        threads=arguments.threads,
        load_average=load,
        steal_share=machine.steal_share(ticks, machine.cpu_times()),
        read_bandwidth_gb_per_s=stream_gb_per_s,
        summaries=[summarize(kind, starts) for kind in KINDS],
        starts=starts,
    )


def print_table(console: Console, report: StartupReport) -> None:
    """Phases down, kinds across."""
    table = Table("", *(f"{summary.kind} start" for summary in report.summaries), title=f"{report.model}, medians")
    for phase in report.starts[0].phases_s:
        table.add_row(phase, *(f"{summary.phases_s[phase]:.3f} s" for summary in report.summaries))
    table.add_row("total", *(f"{s.total_s:.2f} s ({s.min_total_s:.2f}–{s.max_total_s:.2f})" for s in report.summaries))
    if report.summaries[0].disk_s is not None:
        table.add_row("the disk alone", *(f"{s.disk_s:.2f} s" if s.disk_s else "" for s in report.summaries))
    table.add_row(
        "peak memory",
        *(f"{s.peak_rss_bytes / 1e6:,.0f} of {s.rss_limit_bytes / 1e6:,.0f} MB" for s in report.summaries),
    )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the options, measures, prints and saves."""
    parser = option_parser(__doc__, out=RESULTS)
    parser.add_argument("--model", required=True, help="folder or bundled model")
    parser.add_argument("--options", type=json.loads, default={}, help="keywords of LLM, as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="first starts find the model's files on the disk alone")
    parser.add_argument("--scratch", type=Path, help="where packed weights are written; default: the temporary folder")
    parser.add_argument("--name", default="startup", help="part of the result's file name")
    options = parser.parse_args(argv)
    if min(options.repeats, options.threads) < 1:
        parser.error("repeats and threads must be at least 1")
    report = measure(options)
    print_table(Console(), report)
    save(options.out, report)


if __name__ == "__main__":
    main()
