"""Results of offline runs: what was run, where, and what came out, as JSON and as a table.

Made by bench/offline.py, written by bench/report.py. Imports no torch. Fields are only added within a schema version.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from ridgeline.bench.facts import MachineFacts
from ridgeline.bench.metrics import Distribution, Results
from ridgeline.bench.report import Report, numbers_table
from ridgeline.bench.workloads import WorkloadFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingCost:
    """The time that deciding took beside computing, over one run: `Scheduler.plan` and `Scheduler.commit`."""

    num_requests: int
    num_steps: int
    num_sampled_tokens: int
    plan_s: float
    commit_s: float
    s_per_request: float
    s_per_step: float
    share_of_run: float  # of the run's duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A rate over all repeats, in tokens per second."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine that was measured: its model, its resolved choices, and the options that bound a step."""

    model: str
    choices: dict[str, str]
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    prefix_caching: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """The results that one system had. `results` and `scheduling` are those of the run of median duration."""

    system: str
    results: Results
    output_tok_per_s: Spread
    scheduling: SchedulingCost | None  # None: this system has no scheduler
    idle_slot_share: float | None  # of a static batch: slots whose sequence had ended before the longest one did
    outputs_equal_to_first: int  # requests with the same tokens as the report's first system gave


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineReport(Report):
    """Systems on one workload, interleaved in one process: all requests are there from the start."""

    engine: EngineFacts
    workload: WorkloadFacts
    temperature: float
    warmups: int
    repeats: int
    systems: list[SystemResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPoint:
    """One shape of step, whose `tokens_per_step` is the prompt's length for prefill, the batch for decode."""

    kind: str  # "prefill" or "decode"
    tokens_per_step: int
    tok_per_s: Spread
    ms: float  # median: of the whole prompt for prefill, of one step for decode
    scheduling: SchedulingCost


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport(Report):
    """Prefill and decode apart, as llama-bench's pp and tg."""

    engine: EngineFacts
    warmups: int
    repeats: int
    prompt_tokens: int  # of each sequence, before decode is timed
    points: list[LatencyPoint]


def print_offline(console: Console, report: OfflineReport) -> None:
    """Print the systems side by side."""
    _print_head(console, report.engine, report.machine)
    table = numbers_table(f"offline: {report.workload.kind}", "", *(system.system for system in report.systems))

    def row(label: str, value: Callable[[SystemResult], str]) -> None:
        table.add_row(label, *(value(system) for system in report.systems))

    row("requests completed / failed", lambda s: f"{s.results.completed} / {s.results.failed}")
    row("prompt tokens (of them cached)", lambda s: f"{s.results.prompt_tokens} ({s.results.cached_prompt_tokens})")
    row("output tokens", lambda s: str(s.results.output_tokens))
    row("duration (s)", lambda s: f"{s.results.duration_s:.3f}")
    row(f"output tokens / s, median of {report.repeats}", lambda s: _spread(s.output_tok_per_s))
    row("prompt + output tokens / s", lambda s: f"{s.results.total_throughput_tok_per_s:.1f}")
    row("TTFT p50 | p99 (ms)", lambda s: _percentiles(s.results.latencies.ttft_ms))
    row("TPOT p50 | p99 (ms)", lambda s: _percentiles(s.results.latencies.tpot_ms))
    row("ITL p50 | p99 (ms)", lambda s: _percentiles(s.results.latencies.itl_ms))
    row("E2EL p50 | p99 (ms)", lambda s: _percentiles(s.results.latencies.e2el_ms))
    for label, value in SCHEDULING_ROWS.items():
        row(label, lambda s, value=value: "" if s.scheduling is None else value(s.scheduling))
    row("idle batch slots", lambda s: "" if s.idle_slot_share is None else f"{s.idle_slot_share:.1%}")
    first = report.systems[0]
    row(f"outputs as {first.system}", lambda s: f"{s.outputs_equal_to_first} / {s.results.completed}")
    console.print(table)
    for system in report.systems:
        for error, count in system.results.errors.items():
            console.print(f"[red]{system.system}: {count} failed:[/red] {escape(error)}")


def print_latency(console: Console, report: LatencyReport) -> None:
    """Print one line per shape of step."""
    _print_head(console, report.engine, report.machine)
    columns = ("step", f"tokens / s, median of {report.repeats}", "ms", "plan + commit / step (µs)", "share of run")
    table = numbers_table(f"latency: decode after prompts of {report.prompt_tokens} tokens", *columns)
    for point in report.points:
        cost = point.scheduling
        times = f"{point.ms:.2f}", f"{cost.s_per_step * 1e6:.1f}", f"{cost.share_of_run:.2%}"
        table.add_row(f"{point.kind} {point.tokens_per_step}", _spread(point.tok_per_s), *times)
    console.print(table)


SCHEDULING_ROWS: Mapping[str, Callable[[SchedulingCost], str]] = {
    "steps": lambda cost: str(cost.num_steps),
    "tokens sampled / step": lambda cost: f"{cost.num_sampled_tokens / max(1, cost.num_steps):.1f}",
    "plan + commit / request (µs)": lambda cost: f"{cost.s_per_request * 1e6:.1f}",
    "plan + commit / step (µs)": lambda cost: f"{cost.s_per_step * 1e6:.1f}",
    "plan + commit, share of the run": lambda cost: f"{cost.share_of_run:.2%}",
}


def _print_head(console: Console, engine: EngineFacts, machine: MachineFacts) -> None:
    choices = ", ".join(f"{name} {value}" for name, value in engine.choices.items())
    console.print(f"{escape(engine.model)}: {escape(choices)}")
    console.print(f"{escape(machine.cpu_model)}, {machine.usable_cores} cores")


def _spread(spread: Spread) -> str:
    return f"{spread.median:.1f} ({spread.min:.1f}–{spread.max:.1f})"


def _percentiles(values: Distribution | None) -> str:
    return "" if values is None else f"{values.p50:.2f} | {values.p99:.2f}"
