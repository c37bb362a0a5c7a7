"""What a drafter costs: a step while it drafts nothing, beside one without it, and a draft, by the bits of its weights.

usage: python -m benchmarks.speculation.drafters --model python-9m [--speculate draft:python-1m eagle:FOLDER]
                                                 [--schemes none int8 int4] [--tokens 3] [--rounds 7]

Engines take turns on the same prompt, greedily. At rest the drafter is loaded and never asked, as nothing pays for it;
otherwise every step has a draft of --tokens tokens, whatever it gains.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.common import option_parser, save
from benchmarks.speculation.turns import Timed
from rich.console import Console
from rich.table import Table

from ridgeline import SamplingParams
from ridgeline.bench.report import Report
from ridgeline.core.config import EngineConfig
from ridgeline.decoding.draft_control import DraftControl

PROMPT = "def read_lines(path):\n    "
PARAMS = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCell:
    """One drafter with its weights in one scheme. `at_rest` are ratios to the step without it, one of each round."""

    speculate: str
    scheme: str
    plain_us: float
    at_rest: list[float]
    draft_us: float  # the median draft, of all rounds
    acceptance: float  # accepted of drafted tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftersReport(Report):
    """All drafters of one run."""

    model: str
    tokens: int
    cells: list[DrafterCell]


class Drafting:
    """An engine of which every step has a draft, whose drafts are timed."""

    def __init__(self, options: argparse.Namespace, speculate: str, scheme: str) -> None:
        fixed = {"adaptive_speculation": False, "num_speculative_tokens": options.tokens}
        self.timed = Timed(_config(options, speculate=speculate, draft_quantize=scheme, **fixed))
        self.taken_s: list[float] = []
        drafts = self.timed.engine.loop.scheduler.strategy._model
        assert drafts is not None, f"{speculate} has no model"
        self._draft, drafts.draft = drafts.draft, self._timed

    def _timed(self, *asked: object) -> object:
        began_s = time.perf_counter()
        found = self._draft(*asked)
        self.taken_s.append(time.perf_counter() - began_s)
        return found


def _config(options: argparse.Namespace, **more: object) -> EngineConfig:
    return EngineConfig.of(options.model, num_threads=options.threads, **more)


def _token_us(engine: Timed) -> float:
    """The median microseconds of a token, so that a step which was held up does not count."""
    tokenizer = engine.engine.tokenizer
    assert tokenizer is not None, "the model has no tokenizer"
    (output,) = engine.run([tokenizer.encode(PROMPT)], [PARAMS]).outputs
    return statistics.median(output.token_s) * 1e6


def measure(options: argparse.Namespace) -> list[DrafterCell]:
    """Measure every drafter in every scheme."""
    cells: list[DrafterCell] = []
    plain = Timed(_config(options))
    for speculate in options.speculate:
        for scheme in options.schemes:
            resting = Timed(_config(options, speculate=speculate, draft_quantize=scheme))
            drafting = Drafting(options, speculate, scheme)
            plain_us, ratios = list[float](), list[float]()
            for number in range(options.rounds + 1):
                if number == 1:  # the first one warms up
                    plain_us, ratios, drafting.taken_s = [], [], []
                plain_us.append(_token_us(plain))
                with patch.object(DraftControl, "_can_pay", lambda control, num_decodes, lag: False):
                    ratios.append(_token_us(resting) / plain_us[-1])
                _token_us(drafting.timed)
            (counts,) = (each for each in drafting.timed.drafts().values() if each.num_drafts)
            cells.append(
                DrafterCell(
                    speculate=speculate,
                    scheme=scheme,
                    plain_us=statistics.median(plain_us),
                    at_rest=ratios,
                    draft_us=statistics.median(drafting.taken_s) * 1e6,
                    acceptance=counts.num_accepted_tokens / counts.num_draft_tokens,
                )
            )
    return cells


def show(cells: Sequence[DrafterCell], tokens: int) -> None:
    """Print a row for each drafter and scheme."""
    table = Table("drafts", "weights", "µs without", "at rest", f"µs a draft of {tokens}", "accepted")
    for each in cells:
        rest = f"{statistics.median(each.at_rest):.3f} ({min(each.at_rest):.3f} to {max(each.at_rest):.3f})"
        times = f"{each.plain_us:,.0f}", rest, f"{each.draft_us:,.0f}"
        table.add_row(each.speculate, each.scheme, *times, f"{100 * each.acceptance:.0f} %")
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--speculate", nargs="+", default=["draft:python-1m"], help="a draft model or head each")
    parser.add_argument("--schemes", nargs="+", default=["none", "int8", "int4"], help="of its weights")
    parser.add_argument("--tokens", type=int, default=3, help="tokens of a draft")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    cells = measure(options)
    show(cells, options.tokens)
    name = Path(options.model).name
    report = DraftersReport(name=f"speculation-drafters-{name}", model=name, tokens=options.tokens, cells=cells)
    save(options.out, report)


if __name__ == "__main__":
    main()
