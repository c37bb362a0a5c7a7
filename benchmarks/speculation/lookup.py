"""How long one lookup takes, and how long reading a text takes, at a context of so many tokens.

usage: python -m benchmarks.speculation.lookup [--context 100000] [--calls 20000]

Texts of a large and of a small vocabulary, and of one token again and again, the worst case. A call takes in one token
and drafts up to eight, through the same binding as in the engine. Median and 99th percentile, in microseconds.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common import option_parser, save
from rich.console import Console
from rich.table import Table

from ridgeline._native import SuffixIndex
from ridgeline.bench.report import Report
from ridgeline.decoding.proposers.suffix import LENGTHS, MAX_TEXT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRow:
    """One kind of text."""

    text: str
    read_ms: float  # the whole context at once
    call_us: float
    call_us_99: float
    index_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupReport(Report):
    context: int
    rows: list[LookupRow]


def measure(text: str, draw: Callable[[], int], context: int, calls: int) -> LookupRow:
    """Time an index over a text that is drawn token by token."""
    index, tokens = SuffixIndex(list(LENGTHS), MAX_TEXT_TOKENS), [draw() for _ in range(context)]
    begun_s = time.perf_counter()
    index.extend(tokens)
    read_s = time.perf_counter() - begun_s
    times: list[float] = []
    for _ in range(calls):
        token = [draw()]
        begun_s = time.perf_counter()
        index.extend(token)
        index.find_own(8, 1.0, 0.1)
        times.append(time.perf_counter() - begun_s)
    high = statistics.quantiles(times, n=100)[98]
    return LookupRow(
        text=text,
        read_ms=read_s * 1e3,
        call_us=statistics.median(times) * 1e6,
        call_us_99=high * 1e6,
        index_bytes=index.num_bytes,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args(arguments)
    rng = random.Random(0)
    texts = {
        "50,000 tokens, as words come": lambda: int(rng.paretovariate(0.8)) % 50_000,
        "of 64 tokens": lambda: rng.randrange(64),
        "of one token": lambda: 7,
    }
    rows = [measure(text, draw, options.context, options.calls) for text, draw in texts.items()]
    table = Table("text", "reading it, ms", "a call, µs", "99 %", "index, MB")
    for row in rows:
        figures = f"{row.read_ms:.0f}", f"{row.call_us:.2f}", f"{row.call_us_99:.2f}", f"{row.index_bytes / 1e6:.1f}"
        table.add_row(row.text, *figures)
    Console().print(table)
    save(options.out, LookupReport(name="lookup", context=options.context, rows=rows))


if __name__ == "__main__":
    main()
