"""What decoding over latents reads and takes, by context: DeepSeek-V2-Lite's attention in a model of random weights.

usage: python -m benchmarks.latent_decode [--contexts 64 1024 8192] [--layers 8] [--rounds 5] [--steps 24]
                                           [--out benchmarks/results]

Batch 1, bfloat16, native. The time that a context adds to a step stands beside the bytes that it adds by the cost
model: those of the latents, not of the keys and values of 16 heads. A step is everything from plan to commit. The
contexts take turns (after the first round their prompts are cached), so that all see the same machine; what a context
adds is the median over the rounds.
"""

import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.common import model_folder, option_parser, save, step_s
from rich.console import Console
from rich.table import Table

from ridgeline import LLM
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.bench.report import Report
from ridgeline.core.dtypes import BFLOAT16
from ridgeline.cost.roofline import costs_of
from ridgeline.program.lower import lower
from ridgeline.program.pricing import ElementBytes, Load, OpCost
from ridgeline.spec import families
from ridgeline.weights.save import save_weights

HEADS, NOPE, ROPE, VALUE, VOCAB = 16, 128, 64, 128, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Decoding at one context. `expanded_bytes` is what keys and values by head would take instead of latents."""

    context: int
    latent_bytes: float
    expanded_bytes: float
    flops: float
    step_s: list[float]  # one entry per round: its median


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentReport(Report):
    layers: int
    runs: list[Run]


def config(layers: int, max_positions: int) -> dict[str, object]:
    return {
        "model_type": "deepseek_v2",
        "vocab_size": VOCAB,
        "hidden_size": 2048,
        "intermediate_size": 1408,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "num_attention_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "num_experts_per_tok": 1,
        "max_position_embeddings": max_positions,
        "eos_token_id": 2,
    }


def write_model(folder: Path, values: dict[str, object]) -> None:
    """config.json and random weights."""
    spec = families.read_spec(values)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 if len(shape) > 1 else torch.ones(shape)
        for name, shape in lower(spec).weights.items()
    }
    save_weights(folder, spec, as_arrays(weights), BFLOAT16)
    (folder / "config.json").write_text(json.dumps(values))


def prompt(context: int) -> list[int]:
    """Return the same tokens every time."""
    rng = random.Random(context)
    return [rng.randrange(10, VOCAB) for _ in range(context)]


def as_run(llm: LLM, context: int, steps: int, layers: int, rounds_s: list[float]) -> Run:
    program, load = llm.engine.program, Load.decode(1, context + steps // 2)
    cost = sum(costs_of(program, [((op.label,), ElementBytes()) for op in program.ops], load), OpCost())
    return Run(
        context=context,
        latent_bytes=cost.kv_read_bytes,
        expanded_bytes=2.0 * (context + steps // 2) * layers * HEADS * (NOPE + ROPE + VALUE),
        flops=cost.flops,
        step_s=rounds_s,
    )


def show(runs: list[Run]) -> None:
    table = Table("context", "latents MB", "by head MB", "MFLOP", "step ms", "added ms", "added latents GB/s")
    for run in runs:
        seconds = statistics.median(run.step_s)
        added_s = statistics.median(long - short for long, short in zip(run.step_s, runs[0].step_s))
        added_bytes = run.latent_bytes - runs[0].latent_bytes
        table.add_row(
            str(run.context),
            f"{run.latent_bytes / 1e6:.1f}",
            f"{run.expanded_bytes / 1e6:.1f}",
            f"{run.flops / 1e6:.0f}",
            f"{seconds * 1e3:.2f}",
            f"{added_s * 1e3:.2f}",
            f"{added_bytes / added_s / 1e9:.1f}" if added_bytes and added_s > 0 else "",
        )
    Console().print(table)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    contexts = sorted(options.contexts)
    longest = contexts[-1] + options.steps + 64
    with model_folder(None, lambda folder: write_model(folder, config(options.layers, longest))) as folder:
        llm = LLM(
            str(folder),
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=1,
            backend="native",
            num_threads=options.threads,
        )
        rounds = [[step_s(llm, prompt(context), options.steps) for context in contexts] for _ in range(options.rounds)]
        runs = [
            as_run(llm, context, options.steps, options.layers, list(rounds_s))
            for context, rounds_s in zip(contexts, zip(*rounds, strict=True), strict=True)
        ]
    show(runs)
    save(options.out, LatentReport(name="latent-decode", layers=options.layers, runs=runs))


if __name__ == "__main__":
    main()
