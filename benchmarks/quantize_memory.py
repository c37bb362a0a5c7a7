"""How much memory `ridgeline quantize` takes for a model of random weights, beside the bytes of the model.

usage: python -m benchmarks.quantize_memory --scratch DIR [--method rtn] [--mean-bits BITS] [--layers 24]
                                            [--hidden 4096] [--inner 14336] [--limit-mb MB] [--out DIR]

A folder of bfloat16 weights in the shape of a Llama is written into --scratch, quantized in a process of its own, and
removed. What the process has in memory is looked at 20 times a second: at most, and without pages of files, which the
system takes back at will. With --limit-mb the system refuses the process more memory of its own than that.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, option_parser, save
from benchmarks.random_folder import main as write_folder

from ridgeline.bench.report import Report
from ridgeline.weights.folder import ModelFolder

LOOK_S = 0.05
HEAD_DIM, HEADS_PER_KEY = 128, 4
SIZES = {"layers": 24, "hidden": 4096, "inner": 14336, "vocab": 32768}
RUN = "from ridgeline.cli import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport(Report):
    """One run; `peak_bytes` is all that was resident, `peak_own_bytes` what was so without files."""

    method: str
    mean_bits: float | None  # of which some matrices get 8 instead of 4
    shape: dict[str, int]
    threads: int
    model_bytes: int
    largest_matrix_bytes: int  # in float32
    layer_bytes: int  # in float32
    limit_bytes: int | None
    peak_bytes: int
    peak_own_bytes: int
    written_bytes: int
    took_s: float


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def watched(command: Sequence[str], limit_bytes: int | None) -> tuple[int, int]:
    """Run a process; what it had in memory at most, and of that what was its own."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    process, peaks = subprocess.Popen(command, preexec_fn=limit), {"VmHWM": 0, "RssAnon": 0}
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        for line in status.read_text().splitlines():
            name, _, value = line.partition(":")
            if name in peaks:
                peaks[name] = max(peaks[name], int(value.split()[0]) * 1024)
        time.sleep(LOOK_S)
    if process.returncode:
        raise SystemExit(f"quantizing ended with exit code {process.returncode}; see its error above")
    return peaks["VmHWM"], peaks["RssAnon"]


def measure(options: argparse.Namespace) -> MemoryReport:
    model, out = options.scratch / "quantize-memory", options.scratch / "quantize-memory-out"
    heads = options.hidden // HEAD_DIM
    sizes = {"heads": heads, "kv-heads": max(1, heads // HEADS_PER_KEY), "head-dim": HEAD_DIM}
    sizes |= {name: getattr(options, name) for name in SIZES}
    try:
        write_folder([str(model), "--format", "bf16", *(f"--{name}={size}" for name, size in sizes.items())])
        for file in ModelFolder.open("python-1m").path.glob("tokenizer*"):
            shutil.copyfile(file, model / file.name)
        command = [sys.executable, "-c", RUN, "quantize", str(model), "--method", options.method, "--out", str(out)]
        command += ["--eval-tokens", "0", "--num-threads", str(options.threads)]
        command += ["--samples", str(options.samples), "--length", str(options.length)]
        command += ["--mean-bits", str(options.mean_bits)] if options.mean_bits else []
        began_s = time.perf_counter()
        peak, own = watched(command, options.limit_mb and options.limit_mb * 1_000_000)
        took_s, written_bytes, model_bytes = time.perf_counter() - began_s, size_of(out), size_of(model)
    finally:
        for folder in (model, out, out.with_name(out.name + ".partial")):
            shutil.rmtree(folder, ignore_errors=True)
    attention = (2 * sizes["heads"] + 2 * sizes["kv-heads"]) * HEAD_DIM * options.hidden
    return MemoryReport(
        name=f"quantize-memory-{options.method}" + ("-mixed" if options.mean_bits else ""),
        method=options.method,
        mean_bits=options.mean_bits,
        shape=sizes,
        threads=options.threads,
        model_bytes=model_bytes,
        largest_matrix_bytes=4 * options.hidden * max(options.inner, options.vocab),
        layer_bytes=4 * (attention + 3 * options.inner * options.hidden),
        limit_bytes=options.limit_mb and options.limit_mb * 1_000_000,
        peak_bytes=peak,
        peak_own_bytes=own,
        written_bytes=written_bytes,
        took_s=took_s,
    )


def main() -> None:
    """Reads the options, measures, prints and saves."""
    parser = option_parser(__doc__, out=RESULTS)
    parser.add_argument("--scratch", type=Path, required=True, help="folder with room for the model and the result")
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--mean-bits", type=float, help="as of `ridgeline quantize`: 4 and 8 bits")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--samples", type=int, default=16, help="calibration windows of methods that look at text")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--limit-mb", type=int, help="memory of its own that the process may take")
    options = parser.parse_args()
    report = measure(options)
    sizes = ("model", "layer", "peak", "peak_own", "written")
    print("; ".join(f"{name} {getattr(report, f'{name}_bytes') / 1e6:,.0f} MB" for name in sizes))
    save(options.out, report)


if __name__ == "__main__":
    main()
