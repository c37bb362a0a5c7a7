"""A masked diffusion model beside its autoregressive twin: tokens/s and quality against the steps per block.

usage: python -m benchmarks.diffusion --diffusion MODEL --twin MODEL [--scorer python-9m] [--prompts N] [--max-tokens N]

Both continue the same held-out text at temperature 0; the scorer, a model of its own, says how likely it finds what
they wrote (bits per token). The twin's held-out bits per byte stand beside the diffusion model's bound on them.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ridgeline import LLM, DiffusionParams, SamplingParams
from ridgeline.bench.report import Report, save_report
from ridgeline.core.machine import usable_cores
from ridgeline.engine.outputs import RequestOutput
from ridgeline.quality.corpus import split, standard_library
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.jsonfile import read_json_object

PROMPT_TOKENS = 64
BLOCK_LENGTHS = (8, 32)
BATCHES = (1, 16)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to decode: output tokens/s by batch size, and the scorer's bits per token of what it wrote."""

    what: str
    tokens_per_s: dict[str, float]
    scored_bits_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionReport(Report):
    """What is written; `held_out_bits_per_byte` by model."""

    threads: int
    held_out_bits_per_byte: dict[str, object]
    rows: list[Row]


def main() -> None:
    """Measures, prints a table and writes the result."""
    arguments = _arguments()
    prompts = _prompts(arguments.scorer, arguments.prompts)
    scorer = LLM(arguments.scorer)
    rows = [_row(arguments.twin, "one token a step", SamplingParams(**_common(arguments)), prompts, scorer)]
    for block_length in BLOCK_LENGTHS:
        for steps in [2**power for power in range(int(math.log2(block_length)), -1, -1)]:
            options = DiffusionParams(block_length=block_length, steps=steps)
            params = SamplingParams(**_common(arguments), diffusion=options)
            rows.append(_row(arguments.diffusion, f"blocks of {block_length}, {steps} steps", params, prompts, scorer))
    quality = {
        name: read_json_object(ModelFolder.open(model).path / "training.json")["held_out_bits_per_byte"]
        for name, model in (("twin", arguments.twin), ("diffusion (bound)", arguments.diffusion))
    }
    _print(rows, quality)
    result = DiffusionReport(name="diffusion", threads=usable_cores(), held_out_bits_per_byte=quality, rows=rows)
    path = save_report(arguments.out, result)
    print(f"written: {path}")


def _row(model: str, what: str, params: SamplingParams, prompts: list[list[int]], scorer: LLM) -> Row:
    """Output tokens/s at each batch size, and what the scorer thinks of the continuations."""
    llm = LLM(model)
    speeds: dict[str, float] = {}
    outputs: list[RequestOutput] = []
    llm.generate(prompts[:2], params, use_tqdm=False)
    for batch in BATCHES:
        started, outputs = time.perf_counter(), []
        for start in range(0, len(prompts), batch):
            outputs += llm.generate(prompts[start : start + batch], params, use_tqdm=False)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        speeds[str(batch)] = count / (time.perf_counter() - started)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    texts = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    scored_outputs = scorer.generate(texts, scored, use_tqdm=False)
    nats = [
        -entry.logprob for output in scored_outputs for entry in (output.prompt_logprobs or [])[PROMPT_TOKENS:] if entry
    ]
    return Row(what, speeds, sum(nats) / len(nats) / math.log(2))


def _common(arguments: argparse.Namespace) -> dict[str, object]:
    return {"temperature": 0, "max_tokens": arguments.max_tokens, "ignore_eos": True}


def _prompts(model: str, count: int) -> list[list[int]]:
    """Beginnings of held-out files, without the mask that only one of the tokenizers has."""
    tokenizer = LLM(model).engine.tokenizer
    assert tokenizer is not None
    _, held_out = split(standard_library())
    ids = [tokenizer.encode(file.text) for file in held_out]
    return [file[:PROMPT_TOKENS] for file in ids if len(file) >= PROMPT_TOKENS][:count]


def _print(rows: list[Row], quality: dict[str, object]) -> None:
    table = Table("decoding", *(f"tokens/s, batch {batch}" for batch in BATCHES), "scorer, bits/token")
    for row in rows:
        table.add_row(
            row.what, *(f"{speed:,.0f}" for speed in row.tokens_per_s.values()), f"{row.scored_bits_per_token:.2f}"
        )
    Console().print(table)
    Console().print(" · ".join(f"{name}: {bits:.3f} bits/byte held out" for name, bits in quality.items()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--diffusion", required=True, help="a folder of `ridgeline train python-1m-diffusion`")
    parser.add_argument("--twin", required=True, help="a folder of `ridgeline train python-1m`")
    parser.add_argument("--scorer", default="python-9m")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
