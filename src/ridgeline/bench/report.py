"""A benchmark's result: one JSON file that says what was run, where, and what came out; and the same as a table.

Called by the command line and scripts. Fields are only added within a schema version; a changed meaning raises it.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.bench.facts import MachineFacts, SoftwareFacts, machine_facts, software_facts
from ridgeline.bench.load import Load
from ridgeline.bench.metrics import COLUMNS, Distribution, Latencies, Results, SteadyState
from ridgeline.bench.record import RequestRecord
from ridgeline.bench.workloads import WorkloadFacts
from ridgeline.core.errors import ConfigError
from ridgeline.core.files import write_whole

SCHEMA_VERSION = 1


def utc_now() -> str:
    """Return the time of a report, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Every result file says this of itself: its name, when and where it was measured. Benchmarks add fields."""

    schema_version: int = SCHEMA_VERSION
    name: str
    created_utc: str = field(default_factory=utc_now)
    machine: MachineFacts = field(default_factory=machine_facts)
    software: SoftwareFacts = field(default_factory=software_facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport(Report):
    """One run against one server. `server` names what served, `api` and `model` how it was asked."""

    server: str
    api: str
    model: str
    workload: WorkloadFacts
    load: Load
    results: Results
    steady_state: SteadyState | None
    requests: list[RequestRecord] | None = None  # every request's times, where they were asked for


def fit_name(name: str) -> str:
    """Return the name of a result. Raises ConfigError for an unfit one."""
    if not name or not all(char.isalnum() or char in "-_." for char in name):
        raise ConfigError(f"a result's name may hold letters, digits, '-', '_' and '.', got {name!r}")
    return name


def writable(root: Path | None) -> Path | None:
    """Return the folder of results, made where it was missing. Raises ConfigError where nothing can be written."""
    try:
        if root is not None:
            root.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=root).close()
    except OSError as error:
        raise ConfigError(f"no result can be written to {root}: {error.strerror}") from None
    return root


def result_path(root: Path, report: Report) -> Path:
    """Return `<root>/<hardware>/<date>-<name>.json`, with -2, -3, ... where taken.

    Raises ConfigError for an unfit name.
    """
    fit_name(report.name)
    stem = root / report.machine.slug / f"{report.created_utc[:10]}-{report.name}"
    path, number = stem.with_name(stem.name + ".json"), 2
    while path.exists():
        path, number = stem.with_name(f"{stem.name}-{number}.json"), number + 1
    return path


def write_report(path: Path, report: Report) -> None:
    """Write JSON, whole or not at all. Raises ConfigError when the folder cannot be written."""
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the result to {path}: {error}") from None


def save_report(root: Path, report: Report) -> Path:
    """Write to the result's own path under `root`, and return it. Raises ConfigError as the two above."""
    path = result_path(root, report)
    write_report(path, report)
    return path


def print_report(console: Console, report: BenchReport) -> None:
    """Print the result for a person: what ran, the rates, the latencies, the failures."""
    results = report.results
    console.print(f"{escape(report.name)}: {escape(report.server)}, {escape(report.model)}, {report.workload.kind}")
    console.print(f"{escape(report.machine.cpu_model)}, {report.machine.usable_cores} cores")
    console.print(_rates_table(results, report.steady_state))
    # In a burst every request but the first few waits for a slot: that delay is the load itself, not a fault of it.
    send_delay_ms = None if report.load.schedule == "burst" else results.send_delay_ms
    console.print(_latency_table("latency (ms)", results.latencies, send_delay_ms))
    if report.steady_state is not None:
        console.print(_latency_table("latency in the steady state (ms)", report.steady_state.latencies, None))
    for error, count in results.errors.items():
        console.print(f"[red]{count} failed:[/red] {escape(error)}")
    if count := results.requests_without_usage:
        console.print(f"{count} outputs came without usage: their tokens are counted in chunks")


def numbers_table(title: str, *columns: str) -> Table:
    """Return an empty table whose columns are numbers but for the first."""
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _rates_table(results: Results, steady: SteadyState | None) -> Table:
    table = numbers_table("throughput", "", "whole run", "steady state")

    def row(label: str, whole: float | str, inside: float | None = None) -> None:
        text = whole if isinstance(whole, str) else f"{whole:.2f}"
        table.add_row(label, text, "" if inside is None else f"{inside:.2f}")

    row("requests completed / failed / unsent", f"{results.completed} / {results.failed} / {results.unsent}")
    row("duration (s)", results.duration_s, steady and steady.end_s - steady.start_s)
    row("prompt tokens (of them cached)", f"{results.prompt_tokens} ({results.cached_prompt_tokens})")
    row("output tokens", str(results.output_tokens))
    row("requests / s", results.request_throughput_per_s, steady and steady.request_throughput_per_s)
    row("output tokens / s", results.output_throughput_tok_per_s, steady and steady.output_throughput_tok_per_s)
    total = steady and steady.prompt_throughput_tok_per_s + steady.output_throughput_tok_per_s
    row("prompt + output tokens / s", results.total_throughput_tok_per_s, total)
    row("concurrency, peak | mean", str(results.peak_concurrency), steady and steady.mean_concurrency)
    if results.goodput is not None:
        wanted = ", ".join(f"{slo.metric} ≤ {slo.limit_ms:g} ms" for slo in results.goodput.slos)
        row(f"goodput (requests / s with {wanted})", results.goodput.requests_per_s)
        row("attainment, all objectives", f"{results.goodput.attainment:.1%}")
        for metric, share in results.goodput.attainment_by_metric.items():
            row(f"attainment, {metric}", f"{share:.1%}")
    return table


def _latency_table(title: str, latencies: Latencies, send_delay_ms: Distribution | None) -> Table:
    table = numbers_table(title, "", *COLUMNS)
    rows = (
        ("TTFT, time to first token", latencies.ttft_ms),
        ("TPOT, per output token after the first", latencies.tpot_ms),
        ("ITL, between chunks", latencies.itl_ms),
        ("E2EL, end to end", latencies.e2el_ms),
        ("sent later than asked", send_delay_ms),
    )
    for label, values in rows:
        if values is not None:
            table.add_row(label, *values.cells())
    return table
