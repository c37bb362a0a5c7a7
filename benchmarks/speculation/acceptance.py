"""How often drafted tokens are accepted, by domain and position, in loops and outside them: no time is measured.

usage: python -m benchmarks.speculation.acceptance --model python-9m --speculate suffix draft:python-1m eagle:HEAD
       [--domains humaneval modules] [--temperatures 0 0.8] [--prompts 40] [--max-tokens 256] [--tokens 4]

Every draft has `--tokens` tokens where what drafts has as many, at every step. A position's acceptance is the share of
the drafts with such a token that were right up to there; of a tree, its longest way. A draft is in a loop where its
first token is, as `benchmarks.speculation` tells loops.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.common import option_parser, save
from benchmarks.speculation.domains import DATA, DOMAINS, prompts_of
from benchmarks.speculation.turns import Timed, in_loops
from rich.console import Console
from rich.table import Table

from ridgeline import SamplingParams
from ridgeline.bench.report import Report
from ridgeline.core.config import EngineConfig
from ridgeline.core.step import SampledToken, Span
from ridgeline.decoding.strategy import Accepted, SequenceView


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCell:
    """One proposer on one domain. The lists have an entry for each position of a draft, the first one first."""

    speculate: str
    domain: str
    temperature: float
    in_loops: bool
    num_tokens: int  # of the outputs, that are in loops or outside
    num_drafted: list[int]
    num_accepted: list[int]
    acceptance: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceReport(Report):
    """All cells of one run."""

    model: str
    max_tokens: int
    cells: list[AcceptanceCell]


def measure(options: argparse.Namespace) -> Iterator[AcceptanceCell]:
    """Yield the cells of all combinations, what drafts outermost."""
    drafted = {"adaptive_speculation": False, "num_speculative_tokens": options.tokens, "num_threads": options.threads}
    for speculate, domain in product(options.speculate, options.domains):
        timed = Timed(EngineConfig.of(options.model, speculate=speculate, seed=0, **drafted))
        rounds = recorded(timed)
        prompts = prompts_of(domain, timed.engine, options.data, options.prompts, options.max_tokens)
        assert prompts, f"{domain}: no prompt leaves room for {options.max_tokens} tokens"
        for temperature in options.temperatures:
            counts = {where: [[0, 0] for _ in range(options.tokens)] for where in (True, False)}
            num_tokens = {True: 0, False: 0}
            for seed, prompt in enumerate(prompts):
                rounds.clear()
                params = SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=seed)
                loops = in_loops(timed.run([prompt], [params]).outputs[0].token_ids)
                num_tokens = {where: count + loops.count(where) for where, count in num_tokens.items()}
                for place, num_drafted, num_right in rounds:
                    for position in range(num_drafted if place < len(loops) else 0):
                        found = counts[loops[place]][position]
                        found[0] += 1
                        found[1] += position < num_right
            for where, found in counts.items():
                made, right = map(list, zip(*found, strict=True))
                yield AcceptanceCell(
                    speculate=speculate.split(":")[0],
                    domain=domain,
                    temperature=temperature,
                    in_loops=where,
                    num_tokens=num_tokens[where],
                    num_drafted=made,
                    num_accepted=right,
                    acceptance=[r / m if m else 0.0 for r, m in zip(right, made, strict=True)],
                )


def recorded(timed: Timed) -> list[tuple[int, int, int]]:
    """Return what fills as the engine decodes: the place in the output, the drafted and the accepted tokens of each
    round."""
    strategy, rounds = timed.engine.loop.scheduler.strategy, list[tuple[int, int, int]]()
    accept = strategy.accept

    def accepting(view: SequenceView, span: Span, sampled: Sequence[SampledToken]) -> Accepted:
        place = len(view.token_ids) - len(view.request.prompt_ids)
        accepted = accept(view, span, sampled)
        if span.num_optional:
            longest = max(span.depths()) - (span.num_tokens - span.num_optional - 1)
            rounds.append((place, longest, len(accepted.tokens) - 1))
        return accepted

    strategy.accept = accepting
    return rounds


def show(cells: Sequence[AcceptanceCell]) -> None:
    """Print a row for each cell."""
    table = Table("drafts", "domain", "T", "in loops", "tokens", "drafts made", "accepted, by position")
    for each in cells:
        shares = " ".join(f"{share:.2f}" for share in each.acceptance)
        row = each.speculate, each.domain, f"{each.temperature:g}", "yes" if each.in_loops else "no"
        table.add_row(*row, f"{each.num_tokens:,}", f"{each.num_drafted[0]:,}", shares)
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculate", nargs="+", required=True, help="what drafts, one run each")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=["humaneval", "modules"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=40, help="number of a domain's prompts")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of HumanEval.jsonl.gz and spec_bench.jsonl")
    options = parser.parse_args(arguments)
    cells = list(measure(options))
    show(cells)
    name = Path(options.model).name
    report = AcceptanceReport(name=f"acceptance-{name}", model=name, max_tokens=options.max_tokens, cells=cells)
    save(options.out, report)


if __name__ == "__main__":
    main()
