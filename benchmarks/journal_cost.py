"""What the journal costs the loop: microseconds of one step's record, beside the number of sequences.

usage: python benchmarks/journal_cost.py [--steps 20000]

Decode steps in which every sequence is one token on, and steps whose spans are written anew.
"""

import argparse
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from ridgeline.core.step import SampledToken, Span, StepPlan, StepResult
from ridgeline.engine.journal import Journal

BATCHES = (1, 4, 16, 64)
CHUNK = 100  # steps between two looks at the clock


def steps(batch: int, num_steps: int, *, anew: bool) -> Iterator[tuple[StepPlan, StepResult]]:
    """Plans of one token for each of `batch` sequences; `anew`: of other sequences than the step before."""
    result = StepResult(0, tuple(SampledToken(i, 7) for i in range(batch)))
    for step in range(1, num_steps + 1):
        first = step % 2 * batch if anew else 0
        spans = tuple(Span(first + i, step, [7], 1) for i in range(batch))
        yield StepPlan(step, spans, (), (), (), follows=0 if anew else step - 1), result


def cost_us(batch: int, num_steps: int, *, anew: bool) -> float:
    """Least over chunks of steps, in microseconds a step: the others shared the machine."""
    journal, chunks = Journal(num_groups=2, block_size=32), []
    made = list(steps(batch, CHUNK, anew=anew))
    blocks, times_s, num_final = [10, 20, 30, 40, 50, 60], (1.0, 2.0, 3.0, 4.0, 5.0), {}
    for _ in range(num_steps // CHUNK):
        start = time.perf_counter()
        for plan, result in made:
            journal.step(plan, result, times_s, blocks, num_final)
        chunks.append((time.perf_counter() - start) / CHUNK)
    return min(chunks) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    num_steps = parser.parse_args().steps
    table = Table("sequences", "one token on, µs", "spans anew, µs")
    for batch in BATCHES:
        costs = [cost_us(batch, num_steps, anew=anew) for anew in (False, True)]
        table.add_row(str(batch), *(f"{cost:.2f}" for cost in costs))
    Console().print(table)


if __name__ == "__main__":
    main()
