"""Whether plans hold: for some objectives the planned server is run, and so is a grid of others beside it.

usage: python -m benchmarks.plans MODEL [--objectives throughput tpot ttft] [--rounds N] [--requests 48] [--input 96]
                                  [--output 32]

The machine is calibrated for the model first. Each objective is planned by simulation; then, in each of `--rounds`
rounds, the plan is run four times, and each point of the grid twice, there and back, in this process: medians. A plan
holds where at least 95 % of its requests are within the objective, where what it promises is within 15 % of what is
measured, and where no point of the grid that meets the objective makes over 10 % more tokens a second. `tpot` is the
time that 8 sequences need at the length of the requests, and a quarter more, with all requests at once. `ttft` is for 8
users who ask again and again: the grid is run once more before, and what 95 % of the requests stayed within at its
quickest point, and as much more as a plan allows for slow steps and wrong predictions, is the objective.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.common import calibrate, option_parser, save
from rich.console import Console
from rich.table import Table

from ridgeline.bench.metrics import Results, summarize, within_ms
from ridgeline.bench.report import Report
from ridgeline.bench.workload import BenchRequest, random_tokens
from ridgeline.core.config import EngineConfig
from ridgeline.core.slo import Slo, parse_slos
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.planner import SHARE, SLOWER, VERIFIED, Candidate, Plan, compared, plan, run_here
from ridgeline.program.pricing import Load

SEQUENCES, BUDGETS = (4, 8, 16, 32), (128, 512)  # of the grid
USERS, NEAR = 8, 0.1
OBJECTIVES = ("throughput", "tpot", "ttft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration of the grid as it was measured."""

    options: str
    tokens_per_s: float
    attainment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What one plan promised, and what came of it: medians. `figures`: (name, predicted, measured)."""

    objective: str
    slo: str
    options: str
    provenance: str
    is_planned_to_meet: bool
    attainment: float
    figures: list[tuple[str, float, float]]
    grid: list[Point]
    best_tokens_per_s: float | None
    num_candidates: int

    @property
    def worst_error(self) -> float:
        """The largest |predicted ÷ measured − 1|."""
        return max(abs(predicted / measured - 1) for _, predicted, measured in self.figures)

    @property
    def behind_best(self) -> float:
        """How much less it makes than the best point that meets the objective; below 0 where it makes more."""
        own = self.figures[0][2]
        return 1 - own / self.best_tokens_per_s if self.best_tokens_per_s else 0.0

    @property
    def holds(self) -> bool:
        """Whether the plan meets the objective as promised; one that says that nothing does, that nothing does."""
        if not self.is_planned_to_meet:
            return self.best_tokens_per_s is None and self.worst_error <= VERIFIED
        return self.attainment >= SHARE and self.worst_error <= VERIFIED and self.behind_best <= NEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansReport(Report):
    """All objectives of one model."""

    model: str
    rounds: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    plans: list[Verified]


def objective(
    name: str, config: EngineConfig, options: argparse.Namespace, requests: Sequence[BenchRequest]
) -> tuple[Sequence[Slo], int | None]:
    """Return what is asked for, and how many users ask for it; None: all at once."""
    if name == "tpot":
        step_s = simulated_machine(config).step_time.seconds(Load.decode(8, options.input + options.output))
        return parse_slos(f"tpot={1e3 * 1.25 * step_s:.3f}ms"), None
    if name == "ttft":
        grid = filter(_is_in_grid, plan(config, requests, max_concurrency=USERS).candidates)
        reached = [within_ms(run_here(each.config, requests, USERS), "ttft", SHARE) for each in grid]
        return parse_slos(f"ttft={SLOWER * (1 + VERIFIED) * min(reached):.3f}ms"), USERS
    return (), None


def verified(name: str, config: EngineConfig, options: argparse.Namespace) -> Verified:
    """Plan for one objective, and run the plan among the grid."""
    requests = [
        BenchRequest(prompt=random_tokens(5, n, options.input, 400), max_tokens=options.output)
        for n in range(options.requests)
    ]
    slos, users = objective(name, config, options, requests)
    found = plan(config, requests, slos=slos, max_concurrency=users)

    def measured(candidate: Candidate) -> Results:
        return summarize(run_here(candidate.config, requests, users), slos)

    def within(results: Results) -> float:
        return results.goodput.attainment if results.goodput is not None else 1.0

    grid = [each for each in found.candidates if _is_in_grid(each)]
    own, results = list[Results](), {each.name: list[Results]() for each in grid}
    for number, each in enumerate(options.rounds * (*grid, *reversed(grid))):
        if number % max(1, len(grid) // 2) == 0:
            own.append(measured(found.chosen))
        results[each.name].append(measured(each))
    own.append(measured(found.chosen))
    points = [_point(name, runs, within) for name, runs in results.items()]
    meeting = [each.tokens_per_s for each in points if each.attainment >= SHARE]
    return Verified(
        objective=name,
        slo=", ".join(f"{slo.metric} within {slo.limit_ms:.3g} ms" for slo in slos) or "most tokens a second",
        options=found.chosen.name,
        provenance=found.chosen.provenance,
        is_planned_to_meet=found.is_met,
        attainment=median(within(each) for each in own),
        figures=_figures(found, own),
        grid=points,
        best_tokens_per_s=max(meeting, default=None),
        num_candidates=len(found.candidates),
    )


def _point(name: str, runs: Sequence[Results], within: Callable[[Results], float]) -> Point:
    rate = median(each.output_throughput_tok_per_s for each in runs)
    return Point(options=name, tokens_per_s=rate, attainment=median(within(each) for each in runs))


def _is_in_grid(candidate: Candidate) -> bool:
    limits = candidate.config.scheduler
    return (limits.max_num_seqs, limits.max_num_batched_tokens) in itertools.product(SEQUENCES, BUDGETS)


def _figures(found: Plan, own: Sequence[Results]) -> list[tuple[str, float, float]]:
    rows = zip(*(compared(found, each) for each in own), strict=True)
    return [(row[0][0], row[0][1], median(value for _, _, value in row)) for row in rows]


def show(report: PlansReport) -> None:
    """Print a row for each objective, and the grid below."""
    columns = ("plan", "within", "predicted, measured", "worst", "best of the grid", "behind it")
    table = Table("objective", *columns, title=report.model)
    console = Console(width=180)
    for each in report.plans:
        figures = "\n".join(f"{name}: {one:,.1f}, {other:,.1f}" for name, one, other in each.figures)
        best = "none meets it" if each.best_tokens_per_s is None else f"{each.best_tokens_per_s:,.1f}"
        worst, behind = f"{each.worst_error:.1%}", f"{each.behind_best:+.1%}"
        planned = each.options if each.is_planned_to_meet else f"no plan; nearest is {each.options}"
        table.add_row(each.slo, planned, f"{each.attainment:.0%}", figures, worst, best, behind)
    console.print(table)
    for each in report.plans:
        points = "; ".join(f"{p.options}: {p.tokens_per_s:,.0f} tokens/s, {p.attainment:.0%}" for p in each.grid)
        console.print(f"{each.objective}: {'holds' if each.holds else 'does not hold'}. Grid: {points}")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--rounds", type=int, default=1, help="of the grid: the best of few runs is the luckiest")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--input", type=int, default=96, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of each output")
    options = parser.parse_args()
    limits = {"max_model_len": 4 * (options.input + options.output), "enable_prefix_caching": False}
    config = EngineConfig.of(options.model, num_threads=options.threads, tuning="default", **limits)
    calibrate(config)
    report = PlansReport(
        name=f"plans-{Path(options.model).name}",
        model=Path(options.model).name,
        rounds=options.rounds,
        num_requests=options.requests,
        input_tokens=options.input,
        output_tokens=options.output,
        plans=[verified(name, config, options) for name in options.objectives],
    )
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
