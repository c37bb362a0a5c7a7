"""Decoding with a mixture of experts, of which a step reads a fifth: beside the memory bandwidth, and llama.cpp.

usage: python -m benchmarks.moe_decode [--model FOLDER] [--formats bf16 int8 int4] [--repeats 7]
                                       [--llama-bin BUILD/bin --gguf FILE]

FOLDER is written where it is not there: a Qwen3-MoE of random weights, 1.5 billion parameters of which a token uses 0.3
(needs transformers). One process per format. In it the memory bandwidth, steps at batch 1 and, where asked for, the
benchmark of llama.cpp take turns, so that all see the same machine. The share of the stream is (bytes of weights, keys
and values that a step has to read, as the cost model has them) / (time of a step from plan to commit) / (stream beside
it); of the experts alone it is their bytes / (time of their instructions) / (stream). FILE is the same model converted
by llama.cpp, which wants a tokenizer in FOLDER; the figure does not depend on which.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import (
    in_own_process,
    model_folder,
    option_parser,
    save,
    spread,
    stream_bytes_per_s,
    write_random,
)
from benchmarks.peers.systems import LlamaCpp
from benchmarks.peers.workload import Cell
from rich.console import Console
from rich.table import Table

from ridgeline.backends.probe import ceilings, find_native
from ridgeline.bench.profile import Profiler, StepProfile, scheduler_config
from ridgeline.bench.report import Report
from ridgeline.core.config import CacheConfig, EngineConfig, ModelConfig, QuantizeConfig
from ridgeline.engine.build import build_engine

FORMATS = {"bf16": None, "int8": "int8", "int4": "int4"}
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One format; lists have one entry per repeat, the stream one more: before and after each."""

    format: str
    context: int
    bytes_per_step: float
    experts_bytes_per_step: float
    stream_bytes_per_s: list[float]
    step_s: list[float]
    share_of_stream: list[float]
    experts_share_of_stream: list[float]
    llama_cpp_tokens_per_s: list[float]
    times_llama_cpp: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeReport(Report):
    llama_cpp: str | None
    steps_per_repeat: int
    runs: list[Run]


def write_checkpoint(folder: Path) -> None:
    """A Qwen3-MoE of random weights in bfloat16, without a tokenizer."""
    write_random(
        folder,
        "Qwen3MoeForCausalLM",
        vocab_size=32768,
        hidden_size=1536,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=48,
        num_experts_per_tok=6,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )


def measure(options: argparse.Namespace, name: str) -> Run:
    """Runs in a process of its own."""
    threads, context, steps = options.threads, options.context, options.steps
    config = EngineConfig(
        model=ModelConfig(model=str(options.model), dtype="bfloat16", max_model_len=context),
        cache=CacheConfig(prefix_caching=False),
        scheduler=scheduler_config(1, context),
        quantize=QuantizeConfig(scheme=FORMATS[name]),
        num_threads=threads,
    )
    profiler = Profiler(build_engine(config, lambda deltas: None), ceilings(find_native()), threads)
    streams, profiles, peers = [stream_bytes_per_s(threads)], [], []
    for _ in range(options.repeats):
        profiles.append(profiler.decode(1, context, steps))
        streams.append(stream_bytes_per_s(threads))
        if options.gguf:
            peers.append(llama_cpp_tokens_per_s(options))
    beside = [statistics.median(pair) for pair in zip(streams, streams[1:])]
    step_s = [profile.untimed_step_s for profile in profiles]
    return Run(
        format=name,
        context=context,
        bytes_per_step=read_bytes(profiles[0]),
        experts_bytes_per_step=read_bytes(profiles[0], "experts"),
        stream_bytes_per_s=streams,
        step_s=step_s,
        share_of_stream=[read_bytes(p) / s / rate for p, s, rate in zip(profiles, step_s, beside)],
        experts_share_of_stream=[read_bytes(p, "experts") / experts_s(p) / rate for p, rate in zip(profiles, beside)],
        llama_cpp_tokens_per_s=peers,
        times_llama_cpp=[1 / s / peer for s, peer in zip(step_s, peers)],
    )


def read_bytes(profile: StepProfile, kind: str | None = None) -> float:
    """Bytes of weights, keys and values read by all ops of a step or by those of one kind."""
    ops = [op for op in profile.ops if kind in (None, op.kind)]
    return sum(op.cost.weight_bytes + op.cost.kv_read_bytes for op in ops)


def experts_s(profile: StepProfile) -> float:
    return sum(op.measured_s for op in profile.ops if op.kind == "experts")


def llama_cpp_tokens_per_s(options: argparse.Namespace) -> float:
    """Tokens per second for as many tokens after as long a context, by llama-bench."""
    values: list[float] = []
    cell = Cell(
        name="decode_b1", kind="decode", input_tokens=options.context - options.steps, output_tokens=options.steps
    )
    peer = LlamaCpp(binaries=options.llama_bin, gguf=options.gguf, threads=options.threads, timeout_s=TIMEOUT_S)
    peer.run([cell], lambda _: None, lambda _, value: values.append(value))
    return values[0]


def show(runs: list[Run]) -> None:
    table = Table(
        "format", "MB a step", "stream GB/s", "tokens/s", "share of the stream", "experts alone", "× llama.cpp"
    )
    for run in runs:
        table.add_row(
            run.format,
            f"{run.bytes_per_step / 1e6:.0f}",
            f"{statistics.median(run.stream_bytes_per_s) / 1e9:.1f}",
            f"{1 / statistics.median(run.step_s):.1f}",
            spread(run.share_of_stream, ".0%"),
            spread(run.experts_share_of_stream, ".0%"),
            f"{statistics.median(run.times_llama_cpp):.2f}" if run.times_llama_cpp else "",
        )
    Console().print(table)


def parse_options() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, help="reused, and written where it is not there; default: a temporary one"
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--one", metavar="FORMAT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if bool(options.gguf) != bool(options.llama_bin):
        parser.error("--llama-bin and --gguf go together")
    return options


def main() -> None:
    options = parse_options()
    if options.one:
        print(json.dumps(asdict(measure(options, options.one))))
        return
    with model_folder(options.model, write_checkpoint) as folder:
        runs = [
            Run(**in_own_process("benchmarks.moe_decode", "--model", str(folder), "--one", name))
            for name in options.formats
        ]
    show(runs)
    peer = options.gguf.name if options.gguf else None
    save(options.out, MoeReport(name="moe-decode", llama_cpp=peer, steps_per_repeat=options.steps, runs=runs))


if __name__ == "__main__":
    main()
