"""What `LLM.generate` over an iterator of many prompts needs: memory as they are done, and prompts a second.

usage: python -m benchmarks.prompt_iterator [--prompts 1000000] [--model python-1m] [--out DIR]

Each prompt is another one, made as it is drawn, and gets one token. Resident memory is noted where a hundredth, a
tenth, half and all of them are done: a hundredth is as much as the prefix cache needs to be full.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.batch_lines import WORDS, memory_bytes
from benchmarks.common import option_parser, save

from ridgeline import LLM, SamplingParams
from ridgeline.bench.report import Report

SHARES = (0.01, 0.1, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The process when so many prompts were done: its resident memory, and the most of it so far."""

    prompts: int
    rss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IteratorReport(Report):
    """All prompts; `before_bytes` is the resident memory with the model loaded."""

    model: str
    prompts: int
    before_bytes: int
    marks: list[Mark]
    prompts_per_s: float


def texts(count: int) -> Iterator[str]:
    return (f"{WORDS[number % len(WORDS)]}{number} " for number in range(count))


def measure(options: argparse.Namespace) -> IteratorReport:
    llm = LLM(options.model, num_threads=options.threads)
    before_bytes, _ = memory_bytes(os.getpid())
    wanted = {round(share * options.prompts) for share in SHARES}
    marks: list[Mark] = []
    began_s, done = time.perf_counter(), 0
    for done, _ in enumerate(llm.generate(texts(options.prompts), SamplingParams(temperature=0, max_tokens=1)), 1):
        if done in wanted:
            rss_bytes, peak_bytes = memory_bytes(os.getpid())
            marks.append(Mark(prompts=done, rss_bytes=rss_bytes, peak_rss_bytes=peak_bytes))
    assert done == options.prompts, "each prompt has an output"
    return IteratorReport(
        name="prompt-iterator",
        model=options.model,
        prompts=done,
        before_bytes=before_bytes,
        marks=marks,
        prompts_per_s=done / (time.perf_counter() - began_s),
    )


def show(report: IteratorReport) -> None:
    print(f"{report.prompts:,} prompts, {report.prompts_per_s:,.0f}/s; {report.before_bytes / 2**20:.0f} MiB before")
    for mark in report.marks:
        now, most = (size / 2**20 for size in (mark.rss_bytes, mark.peak_rss_bytes))
        print(f"{mark.prompts:>9,} done: {now:.1f} MiB, at most {most:.1f} so far")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    options = parser.parse_args()
    report = measure(options)
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
