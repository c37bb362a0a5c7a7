"""Tokens a second with drafts beside without, in pairs: by domain, batch and temperature, and outside loops.

usage: python -m benchmarks.speculation --model python-9m [--speculate ngram auto] [--domains humaneval modules]
       [--batches 1 4 16 32] [--temperatures 0 0.8] [--prompts 40] [--max-tokens 256] [--pairs 20] [--cold]

Two engines in one process, one with drafts and one without, complete the same batch of prompts in turns of 50 ms; every
second pair begins with the other. Both have the prompts in the prefix cache, so that what is timed is decoding; with
`--cold` neither has a prefix cache, and time begins with the last of the first tokens: a head has seen the prompt then,
of which it knows nothing that the cache had. Engines are opened anew before a prompt comes again: nobody has seen its
output yet. A figure is the median of the ratios.

A token is in a loop where it and those around it repeat what stood p tokens before, for at least 16 tokens and a
whole cycle of p: small models repeat themselves, and lookup then looks better than it is. "Outside loops" are the
tokens that are not, over the time of the steps that made them, a step's time shared by its tokens.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.common import option_parser, save
from benchmarks.speculation.domains import DATA, DOMAINS, prompts_of
from benchmarks.speculation.pairs import Cell, run_pairs, summarize
from benchmarks.speculation.turns import Timed
from rich.console import Console
from rich.table import Table

from ridgeline.bench.report import Report
from ridgeline.core.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReport(Report):
    """All cells of one run."""

    model: str
    options: dict[str, object]
    cold: bool  # prompts computed in every run, where else they were cached
    max_tokens: int
    cells: list[Cell]


def measure(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of all combinations, the domains outermost."""
    base = {
        "num_threads": options.threads,
        "max_num_seqs": max(64, *(2 * batch for batch in options.batches)),
        "seed": 0,
    }
    base |= {"enable_prefix_caching": False} if options.cold else {}
    base |= dict(options.engine or [])
    off = EngineConfig.of(options.model, **base)
    for domain in options.domains:
        engine = Timed(off).engine
        prompts = prompts_of(domain, engine, options.data, options.prompts, options.max_tokens)
        assert prompts, f"{domain}: no prompt leaves room for {options.max_tokens} tokens"
        for batch, temperature, speculate in product(options.batches, options.temperatures, options.speculate):
            on = EngineConfig.of(options.model, speculate=speculate, **base)
            pairs = list(run_pairs((off, on), prompts, batch, temperature, options))
            yield summarize(domain, batch, temperature, speculate, pairs)


def show(cells: Sequence[Cell]) -> None:
    """Print a row for each cell."""
    headings = "domain", "batch", "T", "drafts", "speed-up", "95 %", "outside loops", "in loops", "length", "accepted"
    table = Table(*headings)
    for each in cells:
        made = sum(int(str(stats["num_draft_tokens"])) for stats in map(dict, each.drafts.values()))
        accepted = sum(int(str(stats["num_accepted_tokens"])) for stats in map(dict, each.drafts.values()))
        outside = each.speedup_outside_loops
        table.add_row(
            each.domain,
            str(each.batch),
            f"{each.temperature:g}",
            each.speculate,
            f"{each.speedup.median:.2f} ({each.speedup.low:.2f} to {each.speedup.high:.2f})",
            "" if each.speedup.interval is None else "{:.3f} to {:.3f}".format(*each.speedup.interval),
            "" if outside is None else f"{outside.median:.2f}",
            f"{each.share_in_loops:.0%}",
            f"{each.mean_accepted_length:.2f}",
            f"{accepted / made:.0%} of {made:,}" if made else "none drafted",
        )
    Console(width=160).print(table)


def _option(text: str) -> tuple[str, object]:
    """Parse `quantize=int4`: an option of both engines."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculate", nargs="+", default=["ngram"], help="what drafts, one run each")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=["humaneval", "modules"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=40, help="number of a domain's prompts")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=20, help="number of batches that are computed twice")
    parser.add_argument("--engine", type=_option, nargs="*", metavar="NAME=VALUE", help="options of both engines")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of HumanEval.jsonl.gz and spec_bench.jsonl")
    parser.add_argument("--unseeded", action="store_true", help="requests without a seed: drafts may be rejected")
    parser.add_argument("--cold", action="store_true", help="compute prompts in every run, and time what comes behind")
    parser.add_argument("--cpu-time", action="store_true", help="time by the CPU time of the one thread")
    options = parser.parse_args(arguments)
    assert options.threads == 1 or not options.cpu_time, "--cpu-time sees one thread: use --threads 1"
    cells: list[Cell] = []
    for each in measure(options):
        cells.append(each)
        show([each])
    show(cells)
    name = Path(options.model).stem if options.model.endswith(".gguf") else Path(options.model).name
    report = SpeculationReport(
        name=f"speculation-{name}",
        model=name,
        options=dict(options.engine or []),
        cold=options.cold,
        max_tokens=options.max_tokens,
        cells=cells,
    )
    save(options.out, report)


if __name__ == "__main__":
    main()
