"""Decoding with a state of fixed size: a token should cost the same after a thousand tokens as after 64 thousand.

usage: python -m benchmarks.recurrent_decode [--model FOLDER] [--contexts 1024 4096 16384 65536] [--rounds 3]
                                             [--quantize int8]

FOLDER is written where it is not there: a Mamba-2 of random weights, 0.4 billion parameters (needs transformers). In
one process the contexts take turns, so that all see the same machine: the memory bandwidth, a prompt (after
the first round it is cached), then decode steps at batch 1, half of them with a clock at every op. Beside the time of
a step stand its limit, what the machine's ceilings allow at least, and the share of the stream: (bytes of
weights and state that a step moves) / (time of a step from plan to commit) / (stream before and after).
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import model_folder, option_parser, save, stream_bytes_per_s, write_random
from rich.console import Console
from rich.table import Table

from ridgeline.backends.probe import ceilings, find_native
from ridgeline.bench.profile import Profiler, StepProfile
from ridgeline.bench.report import Report
from ridgeline.core.config import CacheConfig, EngineConfig, ModelConfig, QuantizeConfig, SchedulerConfig
from ridgeline.engine.build import build_engine

CHECKPOINTS_BYTES = 2 << 30  # the states behind all prompts stay, for the rounds to come
RECURRENT = frozenset({"causal_conv", "selective_scan", "ssd", "delta_rule", "retention", "gated_norm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Steps of `tokens` tokens of a prompt. `recurrent_share` is the part of a step in the recurrent ops."""

    tokens: int
    tokens_per_s: float
    most_tokens_per_s: float  # at the limit of a step
    recurrent_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Steps of one token; lists have one entry per round. `recurrent_s` is the time of a step in the recurrent ops."""

    context: int
    limit_s: float
    bytes_per_step: float
    step_s: list[float]
    recurrent_s: list[float]
    stream_bytes_per_s: list[float]
    share_of_stream: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentReport(Report):
    quantize: str | None
    threads: int
    steps: int
    prefill: Prefill
    decode: list[Decode]
    longest_over_shortest: list[float]  # time of a step at the longest context / at the shortest, by round


def write_checkpoint(folder: Path) -> None:
    """A Mamba-2 of random weights in bfloat16, without a tokenizer."""
    write_random(
        folder,
        "Mamba2ForCausalLM",
        vocab_size=50288,
        hidden_size=1024,
        num_hidden_layers=48,
        num_heads=32,
        head_dim=64,
        state_size=128,
        n_groups=1,
        expand=2,
        conv_kernel=4,
        tie_word_embeddings=True,
        pad_token_id=None,
    )


def measure(folder: Path, options: argparse.Namespace) -> tuple[Prefill, list[Decode]]:
    threads, contexts = options.threads, sorted(options.contexts)
    config = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="bfloat16", max_model_len=contexts[-1]),
        cache=CacheConfig(kv_cache_bytes=CHECKPOINTS_BYTES),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=options.chunk),
        quantize=QuantizeConfig(scheme=options.quantize),
        num_threads=threads,
    )
    engine, hardware = build_engine(config, lambda deltas: None), ceilings(find_native())
    prompt = Profiler(engine, hardware, threads, seed=1).prefill(options.chunk, 4)
    prefill = Prefill(
        tokens=options.chunk,
        tokens_per_s=options.chunk / prompt.untimed_step_s,
        most_tokens_per_s=options.chunk / prompt.limit_s,
        recurrent_share=recurrent_s(prompt) / prompt.step_s,
    )
    rounds = [
        # One seed: the longer prompts begin with the shorter ones, and each is cached after its first turn.
        [turn(Profiler(engine, hardware, threads, seed=0), context, options) for context in contexts]
        for _ in range(options.rounds)
    ]
    return prefill, [as_decode(context, turns) for context, turns in zip(contexts, zip(*rounds), strict=True)]


@dataclass(frozen=True, slots=True)
class Turn:
    profile: StepProfile
    stream_bytes_per_s: float


def turn(profiler: Profiler, context: int, options: argparse.Namespace) -> Turn:
    before = stream_bytes_per_s(options.threads)
    profile = profiler.decode(1, context, options.steps)
    return Turn(profile, statistics.fmean((before, stream_bytes_per_s(options.threads))))


def as_decode(context: int, turns: Sequence[Turn]) -> Decode:
    num_bytes = moved_bytes(turns[0].profile)
    return Decode(
        context=context,
        limit_s=turns[0].profile.limit_s,
        bytes_per_step=num_bytes,
        step_s=[turn.profile.untimed_step_s for turn in turns],
        recurrent_s=[recurrent_s(turn.profile) for turn in turns],
        stream_bytes_per_s=[turn.stream_bytes_per_s for turn in turns],
        share_of_stream=[num_bytes / turn.profile.untimed_step_s / turn.stream_bytes_per_s for turn in turns],
    )


def moved_bytes(profile: StepProfile) -> float:
    """Weights and state, read and written."""
    costs = [op.cost for op in profile.ops]
    return sum(cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes for cost in costs)


def recurrent_s(profile: StepProfile) -> float:
    return sum(op.measured_s for op in profile.ops if op.kind in RECURRENT)


def show(prefill: Prefill, decode: list[Decode]) -> None:
    table = Table("context", "step ms", "limit ms", "recurrent ops ms", "MB a step", "share of the stream")
    for run in decode:
        table.add_row(
            f"{run.context:,}",
            f"{statistics.median(run.step_s) * 1e3:.2f}",
            f"{run.limit_s * 1e3:.2f}",
            f"{statistics.median(run.recurrent_s) * 1e3:.2f}",
            f"{run.bytes_per_step / 1e6:.0f}",
            f"{statistics.median(run.share_of_stream):.0%}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"prefill, {prefill.tokens:,} tokens a step: {prefill.tokens_per_s:,.0f} tokens/s, at the limit "
        f"{prefill.most_tokens_per_s:,.0f}; {prefill.recurrent_share:.0%} of the time in the recurrent ops"
    )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, help="reused, and written where it is not there; default: a temporary one"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt in a step")
    parser.add_argument("--steps", type=int, default=32, help="of each kind and context, timed")
    options = parser.parse_args()
    with model_folder(options.model, write_checkpoint) as folder:
        prefill, decode = measure(folder, options)
    show(prefill, decode)
    report = RecurrentReport(
        name="recurrent-decode",
        quantize=options.quantize,
        threads=options.threads,
        steps=options.steps,
        prefill=prefill,
        decode=decode,
        longest_over_shortest=[long / short for long, short in zip(decode[-1].step_s, decode[0].step_s)],
    )
    save(options.out, report)


if __name__ == "__main__":
    main()
