"""What share of the machine's roof whole steps reach, per weight format: prefill, batches and batch 1.

usage: python -m benchmarks.roof --model MODEL [--formats bf16 int8 int4] [--batches 1 16] [--prompt 512] [--repeats 3]

A format is also a quantized folder or a GGUF file, in the model's place; `:int16` behind it: with inputs of 16 bits.

Every repeat runs `ridgeline profile` once for each format and batch, in a process of its own, formats in turn. The
share is the limit of a step's ops by the ceilings that were measured just before and after it, by the time they took.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import model_of_format, option_parser, save, spread
from rich.console import Console
from rich.table import Table

from ridgeline.bench.report import Report

FORMATS: dict[str, list[str]] = {
    "bf16": [],
    "int8": ["--quantize", "int8"],
    "int4": ["--quantize", "int4"],
    "mxfp4": ["--quantize", "mxfp4"],
    "nvfp4": ["--quantize", "nvfp4"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of step with weights of one format; lists have one entry per repeat."""

    format: str
    step: str
    share_of_roof: list[float] = field(default_factory=list)
    outside_ops: list[float] = field(default_factory=list)  # as a share of the step
    step_s: list[float] = field(default_factory=list)
    read_bytes_per_s: list[float] = field(default_factory=list)  # of these seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RoofReport(Report):
    model: str
    context: int
    rows: list[Row]


def profile(model: str, chosen: list[str], batch: int, prompt: int, context: int, threads: int) -> list[dict]:
    """Return the steps of one `ridgeline profile`."""
    command = [sys.executable, "-c", "from ridgeline.cli import main; main()", "profile", model, *chosen, "--json"]
    sizes = {"--batch": batch, "--prompt": prompt, "--context": context, "--num-threads": threads}
    command += [part for option, value in sizes.items() for part in (option, str(value))]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["steps"]


def measure(
    model: str, formats: list[str], batches: list[int], prompt: int, context: int, repeats: int, threads: int
) -> list[Row]:
    """Profile every format, batch after batch; the prompt goes with the first batch."""
    rows: dict[tuple[str, str], Row] = {}
    for _ in range(repeats):
        for index, batch in enumerate(batches):
            for name in formats:
                chosen = model_of_format(name, FORMATS, model, ["--quantize-inputs", "int16"])
                for step in profile(*chosen, batch, 0 if index else prompt, context, threads):
                    row = rows.setdefault((name, step["name"]), Row(format=Path(name).name, step=step["name"]))
                    row.share_of_roof.append(step["limit_s"] / step["measured_ops_s"])
                    step_s = step["successive_step_s"] or step["step_s"]
                    row.outside_ops.append(1 - step["measured_ops_s"] / step_s)
                    row.step_s.append(step_s)
                    row.read_bytes_per_s.append(step["stream_bytes_per_s"])
    return [rows[key] for key in sorted(rows, key=lambda key: (key[1], formats.index(key[0])))]


def show(rows: list[Row]) -> None:
    table = Table("step", "format", "share of the roof", "outside the ops", "step ms", "reads GB/s")
    for row in rows:
        reads = statistics.median(row.read_bytes_per_s) / 1e9
        ms = [seconds * 1e3 for seconds in row.step_s]
        shares = (spread(row.share_of_roof, ".0%"), spread(row.outside_ops, ".1%"), spread(ms, ".1f"))
        table.add_row(row.step, row.format, *shares, f"{reads:.0f}")
    Console().print(table)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sizes = (options.batches, options.prompt, options.context, options.repeats)
    rows = measure(options.model, options.formats, *sizes, options.threads)
    show(rows)
    model = Path(options.model).name
    save(options.out, RoofReport(name=f"roof-{model}", model=model, context=options.context, rows=rows))


if __name__ == "__main__":
    main()
