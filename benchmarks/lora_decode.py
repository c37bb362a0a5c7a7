"""What adapters cost a decoding batch: the base model alone, one adapter for all, and several mixed in one batch.

usage: python -m benchmarks.lora_decode --model FOLDER [--batch 16] [--rank 16] [--adapters 4] [--repeats 7]

Adapters of random factors are made on the spot, on every linear layer of the checkpoint. Three engines of FOLDER take
turns, so that all see the same machine: without adapters, with one that every sequence uses, and with several that the
batch is shared out to. A step is everything from plan to commit; tokens per second are those of the whole batch.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmarks.common import option_parser, save, spread
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from ridgeline.bench.report import Report
from ridgeline.core.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ridgeline.core.params import SamplingParams
from ridgeline.engine.build import build_engine
from ridgeline.engine.engine import Engine
from ridgeline.weights.checkpoint import Checkpoint

WARM_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine; lists have one entry per repeat. `times_base` compares with the base model's of the same repeat."""

    adapters: int
    tokens_per_s: list[float]
    times_base: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraReport(Report):
    model: str
    batch: int
    rank: int
    prompt_tokens: int
    steps_per_repeat: int
    runs: list[Run]


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    """PEFT's two files, with factors for every matrix of the checkpoint's layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in Checkpoint.open(model).entries.items():
        if ".layers." in name and name.endswith("_proj.weight") and len(entry.shape) == 2:
            num_outputs, num_inputs = entry.shape
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, num_inputs, generator=generator) / num_inputs
            tensors[f"{layer}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator) / rank
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def build(options: argparse.Namespace, adapters: Sequence[Path]) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(options.model), dtype="bfloat16", max_model_len=_context(options)),
        cache=CacheConfig(prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=options.batch, max_num_batched_tokens=options.batch * options.prompt),
        backend=BackendConfig(backend="native"),
        num_threads=options.threads,
        adapters={folder.name: str(folder) for folder in adapters},
    )
    return build_engine(config, lambda deltas: None)


def step_s(engine: Engine, options: argparse.Namespace, rng: np.random.Generator) -> float:
    """Seconds of decoding alone: the median of the steps behind the prompts' own and a few warm ones."""
    names = engine.info.adapters or (None,)
    params = SamplingParams(temperature=0, max_tokens=_context(options) - options.prompt, ignore_eos=True)
    prompts = rng.integers(0, engine.spec.vocab_size, (options.batch, options.prompt)).tolist()
    requests = [
        engine.intake.request(prompt, params, adapter=names[at % len(names)]) for at, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.loop.submit(request)
    times = list(_steps(engine, 1 + WARM_STEPS + options.steps))
    for request in requests:
        engine.loop.abort(request.request_id)
    engine.loop.process_input_queue()
    return statistics.median(times[1 + WARM_STEPS :])


def _steps(engine: Engine, count: int) -> Iterator[float]:
    for _ in range(count):
        started = time.perf_counter()
        engine.loop.step()
        yield time.perf_counter() - started


def _context(options: argparse.Namespace) -> int:
    return options.prompt + options.steps + WARM_STEPS + 2


def show(runs: Sequence[Run]) -> None:
    table = Table("adapters in the batch", "tokens/s", "beside the base model")
    for run in runs:
        rate = f"{statistics.median(run.tokens_per_s):.1f}"
        table.add_row(str(run.adapters), rate, spread(run.times_base, ".2f"))
    Console().print(table)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / f"adapter-{number}" for number in range(options.adapters)]
        for number, folder in enumerate(folders):
            write_adapter(folder, options.model, options.rank, number)
        counts = [0, 1, options.adapters]
        engines = [build(options, folders[:count]) for count in counts]
    rates = [[options.batch / step_s(engine, options, rng) for engine in engines] for _ in range(options.repeats)]
    runs = [
        Run(
            adapters=count,
            tokens_per_s=[rate[at] for rate in rates],
            times_base=[rate[at] / rate[0] for rate in rates],
        )
        for at, count in enumerate(counts)
    ]
    show(runs)
    report = LoraReport(
        name="lora-decode",
        model=options.model.name,
        batch=options.batch,
        rank=options.rank,
        prompt_tokens=options.prompt,
        steps_per_repeat=options.steps,
        runs=runs,
    )
    save(options.out, report)


if __name__ == "__main__":
    main()
