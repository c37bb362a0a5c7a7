"""What a long batch needs: memory as its lines are done, lines a second, and a resumption after kill -9.

usage: python -m benchmarks.batch_lines [--lines 100000] [--model python-1m] [--kill-at 0.3] [--out DIR]

`ridgeline batch` runs a file of that many lines, each for one token. It is killed once, where that share of them is
done, and run again. Its memory is noted where a tenth and each quarter of the lines are done; at the end each line must
be there once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from benchmarks.common import option_parser, save

from ridgeline.bench.report import Report

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
LOOK_S = 0.05
WORDS = ("import ", "def f(", "class A:\n", "return ", "for x in ", "print(", "self.", "if not ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The process when so many lines were done: its resident memory, and the most of it so far."""

    lines: int
    run: int
    rss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process: when its first results came, with input and model read before, and how fast the others did."""

    lines: int
    first_s: float
    lines_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesReport(Report):
    """All of a batch; `missing` and `repeated` lines are bugs."""

    model: str
    lines: int
    input_bytes: int
    output_bytes: int
    marks: list[Mark]
    runs: list[Run]
    missing: int
    repeated: int
    failed: int


class _Line(msgspec.Struct):
    custom_id: str
    response: dict[str, object]


def write_input(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            body = {"prompt": f"{WORDS[number % len(WORDS)]}{number} ", "max_tokens": 1, "temperature": 0}
            asked = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(asked) + "\n")


@dataclass
class Results:
    """Counts the whole lines of a file that grows; half of one at its end may be cut off again."""

    path: Path
    done: int = 0
    _read: int = 0

    def look(self) -> int:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                while whole := (data := file.read(2**20)).rfind(b"\n") + 1:
                    self._read += whole
                    self.done += data.count(b"\n")
                    file.seek(self._read)
        return self.done


def memory_bytes(pid: int) -> tuple[int, int]:
    """Return a process's resident memory, and its peak; zeros once it has ended."""
    rows = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    found = {row[0]: int(row[1]) * 1024 for row in rows if row[0] in ("VmRSS:", "VmHWM:")}
    return found.get("VmRSS:", 0), found.get("VmHWM:", 0)


@dataclass
class Batch:
    """Runs the command, and looks at it as it goes."""

    options: argparse.Namespace
    folder: Path
    marks: list[Mark] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def run(self, results: Results, kill_at: int | None) -> None:
        """Run the command to its end, or kill it where `kill_at` lines are done."""
        command = [sys.executable, "-m", "ridgeline", "batch", self.options.model, "in.jsonl", "out.jsonl"]
        command += ["--num-threads", str(self.options.threads)]
        began_s, first_s, before, memory = time.perf_counter(), 0.0, results.look(), (0, 0)
        process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                done, seen = results.look(), memory_bytes(process.pid)
                memory = seen if seen[0] else memory  # none once it has ended
                first_s = first_s or (time.perf_counter() - began_s if done > before else 0.0)
                self._mark(done, memory)
                if kill_at is not None and done >= kill_at:
                    process.kill()
                    break
                time.sleep(LOOK_S)
            else:
                assert process.returncode == 0, f"the batch ended with {process.returncode}"
                self._mark(results.look(), memory)
        finally:
            process.kill()
            process.wait()
        done, taken_s = results.look() - before, time.perf_counter() - began_s
        self.runs.append(Run(lines=done, first_s=first_s, lines_per_s=done / (taken_s - first_s)))

    def _mark(self, done: int, memory: tuple[int, int]) -> None:
        """Note the memory where the next mark is passed."""
        wanted = [round(share * self.options.lines) for share in SHARES]
        if len(self.marks) < len(wanted) and done >= wanted[len(self.marks)]:
            rss_bytes, peak_bytes = memory
            self.marks.append(Mark(lines=done, run=len(self.runs) + 1, rss_bytes=rss_bytes, peak_rss_bytes=peak_bytes))


def measure(options: argparse.Namespace) -> LinesReport:
    with tempfile.TemporaryDirectory() as name:
        folder, decoder = Path(name), msgspec.json.Decoder(_Line)
        write_input(folder / "in.jsonl", options.lines)
        batch, results = Batch(options, folder), Results(folder / "out.jsonl")
        if options.kill_at:
            batch.run(results, round(options.kill_at * options.lines))
        batch.run(results, None)
        times_N, failed = bytearray(options.lines), 0
        with results.path.open("rb") as file:
            for line in map(decoder.decode, file):
                times_N[int(line.custom_id)] = min(255, times_N[int(line.custom_id)] + 1)
                failed += line.response["status_code"] != 200
        counts = Counter(times_N)
        return LinesReport(
            name="batch-lines",
            model=options.model,
            lines=options.lines,
            input_bytes=(folder / "in.jsonl").stat().st_size,
            output_bytes=results.path.stat().st_size,
            marks=batch.marks,
            runs=batch.runs,
            missing=counts.pop(0, 0),
            repeated=sum(counts.values()) - counts[1],
            failed=failed,
        )


def show(report: LinesReport) -> None:
    print(f"{report.lines:,} lines, {report.input_bytes / 1e6:.0f} MB, to {report.output_bytes / 1e6:.0f} MB")
    for number, run in enumerate(report.runs, 1):
        rate = f"{run.lines_per_s:,.0f} lines/s"
        print(f"run {number}: {run.lines:,} lines, the first after {run.first_s:.1f} s, then {rate}")
    for mark in report.marks:
        now, most = (size / 2**20 for size in (mark.rss_bytes, mark.peak_rss_bytes))
        print(f"{mark.lines:>9,} lines done (run {mark.run}): {now:.0f} MiB, at most {most:.0f} so far")
    print(f"missing {report.missing}, repeated {report.repeated}, failed {report.failed}")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kill-at", type=float, default=0.3, help="share of the lines; 0: not at all")
    options = parser.parse_args()
    report = measure(options)
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
