"""What a step with a tree takes beside one with a chain of as many tokens, and one without drafts.

usage: python -m benchmarks.speculation.trees --model MODEL [--tokens 8] [--contexts 64 512 960] [--steps 60]

Every draft is wrong, so that each step gains one token, whatever it verifies.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.common import option_parser, save
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams
from ridgeline.bench.report import Report
from ridgeline.core.step import StepPlan, StepResult
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.decoding.strategy import SequenceView
from ridgeline.decoding.trees import tree_of
from ridgeline.engine.request import Event

WARMUP_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCell:
    """One shape behind a text of `context` tokens: the median step, and its ratio to that without drafts."""

    context: int
    shape: str
    step_ms: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TreesReport(Report):
    """All shapes of one run."""

    model: str
    tokens: int
    cells: list[TreeCell]


class _Wrong:
    """Proposes branches of tokens that the model hardly ever samples."""

    def __init__(self, num_branches: int, num_tokens: int, vocab_size: int) -> None:
        length = num_tokens // num_branches
        last = vocab_size - 1
        token_ids, parents = tree_of([[last - b * length - i for i in range(length)] for b in range(num_branches)])
        self._draft = Draft(token_ids, 0, parents=parents)

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        return self._draft

    def forget(self, view: SequenceView) -> None:
        pass


def shapes(num_tokens: int) -> dict[str, int]:
    """Return how many branches each shape has, by its name; 0: no drafts."""
    return {"no drafts": 0, "chain": 1, "branches of 2": num_tokens // 2, "siblings": num_tokens}


def measure(options: argparse.Namespace) -> TreesReport:
    """Measure every shape at every context."""
    llm = LLM(options.model, num_threads=options.threads, enable_prefix_caching=False)
    scheduler, vocab_size = llm.engine.loop.scheduler, llm.engine.info.vocab_size
    plain, cells = scheduler.strategy, list[TreeCell]()
    for context in options.contexts:
        plain_s = 0.0
        for shape, num_branches in shapes(options.tokens).items():
            scheduler.strategy = plain
            if num_branches:
                wrong = _Wrong(num_branches, options.tokens, vocab_size)
                scheduler.strategy = Speculative({"wrong": wrong}, options.tokens, None, time.monotonic)
            step_s = _step_s(llm, context, options.steps)
            plain_s = plain_s or step_s
            cells.append(TreeCell(context=context, shape=shape, step_ms=step_s * 1e3, ratio=step_s / plain_s))
    name = f"speculation-trees-{Path(options.model).name}"
    return TreesReport(name=name, model=options.model, tokens=options.tokens, cells=cells)


def _step_s(llm: LLM, context: int, num_steps: int) -> float:
    """Return the median seconds from a decode step's end to the next one's."""
    scheduler, ends = llm.engine.loop.scheduler, list[float]()
    commit = scheduler.commit

    def watched(plan: StepPlan, result: StepResult, seconds: float) -> list[Event]:
        ends.append(time.perf_counter())
        return commit(plan, result, seconds)

    scheduler.commit = watched
    params = SamplingParams(temperature=0, max_tokens=num_steps + WARMUP_STEPS, ignore_eos=True)
    try:
        llm.generate([[20 + i % 97 for i in range(context)]], params, use_tqdm=False)
    finally:
        scheduler.commit = commit
    return statistics.median([end - begin for begin, end in pairwise(ends[-num_steps:])])


def show(cells: Sequence[TreeCell]) -> None:
    """Print a row for each shape."""
    table = Table("context", "shape", "ms a step", "times one without drafts")
    for cell in cells:
        table.add_row(str(cell.context), cell.shape, f"{cell.step_ms:.3f}", f"{cell.ratio:.2f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 960])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    report = measure(options)
    show(report.cells)
    save(options.out, report)


if __name__ == "__main__":
    main()
