"""How near decoding comes to the speed at which this machine reads memory, per weight format.

usage: python -m benchmarks.decode_stream --model MODEL [--contexts 64 8192] [--formats bf16 int8 int4] [--repeats 7]

A format is also a quantized folder or a GGUF file, in the model's place; `:int16` behind it: with inputs of 16 bits.

One process per format and context. In it, reading a buffer of 1 GiB and runs of decode steps at batch 1 take turns, so
that both see the same machine. The figure is (bytes of packed weights and of keys and values that a step reads) / (time
of a step) / (median of the streams measured before and after it); a step is everything from plan to commit.
"""

import argparse
import json
import math
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import in_own_process, model_of_format, option_parser, save, step_s, stream_bytes_per_s
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams, quant
from ridgeline.bench.report import Report
from ridgeline.cost.account import kv_bytes_per_token
from ridgeline.quant.kv import ENTRY_BYTES

FORMATS: dict[str, dict[str, object]] = {
    "bf16": {},
    "int8": {"quantize": "int8", "quantize_inputs": "int16"},
    "int4": {"quantize": "int4", "quantize_inputs": "int16"},
    "int8 int8-inputs": {"quantize": "int8", "quantize_inputs": "int8"},
    "int4 int8-inputs": {"quantize": "int4", "quantize_inputs": "int8"},
    "mxfp4": {"quantize": "mxfp4", "quantize_inputs": "int16"},
    "mxfp4 int8-inputs": {"quantize": "mxfp4", "quantize_inputs": "int8"},
    "nvfp4": {"quantize": "nvfp4", "quantize_inputs": "int16"},
    "nvfp4 int8-inputs": {"quantize": "nvfp4", "quantize_inputs": "int8"},
    "nf4": {"quantize": "nf4", "quantize_inputs": "int16"},
    "nf4 int8-inputs": {"quantize": "nf4", "quantize_inputs": "int8"},
    "fp8": {"quantize": "fp8"},
    "bf16 kv-int8": {"kv_dtype": "int8"},
    "bf16 kv-fp8": {"kv_dtype": "fp8"},
    "bf16 kv-int4": {"kv_dtype": "int4"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One format at one context; lists have one entry per repeat."""

    format: str
    context: int
    bytes_per_step: float
    stream_bytes_per_s: list[float]  # one more than repeats: before and after each
    step_s: list[float]
    share_of_stream: list[float]
    median_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport(Report):
    model: str
    steps_per_repeat: int
    tuning: str
    runs: list[Run]


def measure(model: str, name: str, context: int, repeats: int, steps: int, threads: int, tuning: str = "auto") -> Run:
    """Runs in a process of its own."""
    model, chosen = model_of_format(name, FORMATS, model, {"quantize_inputs": "int16"})
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=context + (repeats + 1) * steps + 64,
        max_num_seqs=1,
        num_threads=threads,
        tuning=tuning,
        **chosen,
    )
    rng = random.Random(0)
    prompt = [rng.randrange(10, 1000) for _ in range(context)]
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)

    streams, times = [stream_bytes_per_s(threads)], []
    for _ in range(repeats):
        times.append(step_s(llm, prompt, steps))
        streams.append(stream_bytes_per_s(threads))
    program = llm.engine.program
    kv_bytes = kv_bytes_per_token(program, ENTRY_BYTES[str(chosen.get("kv_dtype", "bfloat16"))]) * (context + steps / 2)
    num_bytes = _weight_bytes(llm, chosen.get("quantize")) + kv_bytes
    shares = [
        num_bytes / seconds / statistics.median((before, after))
        for seconds, before, after in zip(times, streams, streams[1:])
    ]
    return Run(
        format=Path(name).name,
        context=context,
        bytes_per_step=num_bytes,
        stream_bytes_per_s=streams,
        step_s=times,
        share_of_stream=shares,
        median_share=statistics.median(shares),
    )


def _weight_bytes(llm: LLM, scheme: object) -> float:
    """Return the bytes of the packed weights, less an embedding of its own, of which a step reads one row."""
    program = llm.engine.program
    heads = {op.weights[0] for op in program.ops if op.kind == "lm_head"}
    tables = [op.weights[0] for op in program.ops if op.kind == "embed" and op.weights[0] not in heads]
    shapes = [program.weights[name] for name in tables]
    if scheme is None:
        return llm.engine.info.weight_bytes - sum(2 * math.prod(shape) for shape in shapes)
    form = quant.scheme(str(scheme)).stored_format(None, False)
    return llm.engine.info.weight_bytes - sum(form.num_bytes(shape) for shape in shapes)


def show(runs: list[Run]) -> None:
    table = Table("format", "context", "MB a step", "stream GB/s", "step ms", "share of the stream", "range")
    for run in runs:
        table.add_row(
            run.format,
            str(run.context),
            f"{run.bytes_per_step / 1e6:.0f}",
            f"{statistics.median(run.stream_bytes_per_s) / 1e9:.1f}",
            f"{statistics.median(run.step_s) * 1e3:.2f}",
            f"{run.median_share:.0%}",
            f"{min(run.share_of_stream):.0%} to {max(run.share_of_stream):.0%}",
        )
    Console().print(table)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64])
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tuning", default="auto", help="as `--tuning` of the engine: variants of kernels")
    parser.add_argument("--one", nargs=2, metavar=("FORMAT", "CONTEXT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, context = options.one
        sizes = (options.repeats, options.steps, options.threads)
        run = measure(options.model, name, int(context), *sizes, options.tuning)
        print(json.dumps(asdict(run)))
        return
    runs = [
        Run(**in_own_process("benchmarks.decode_stream", "--one", name, str(context)))
        for context in options.contexts
        for name in options.formats
    ]
    show(runs)
    model = Path(options.model).name
    report = StreamReport(
        name=f"decode-stream-{model}", model=model, steps_per_repeat=options.steps, tuning=options.tuning, runs=runs
    )
    save(options.out, report)


if __name__ == "__main__":
    main()
