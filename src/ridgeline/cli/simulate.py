"""Run a workload through the engine on a fake clock, or a recorded run again."""

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.bench.load import Load
from ridgeline.cli._options import (
    AcceptanceOption,
    GoodputOption,
    HardwareOption,
    TraceOption,
    WorkloadOption,
    with_options,
)
from ridgeline.core.config import EngineConfig

LEFT_OUT = {"time_limit_s", "request_timeout_s", "journal", "task"}  # of a simulation


@with_options(without=LEFT_OUT)
def simulate(
    load: Load,
    config: EngineConfig,
    workload: WorkloadOption = "fixed",
    trace: TraceOption = None,
    hardware: HardwareOption = "this",
    goodput: GoodputOption = "",
    acceptance: AcceptanceOption = "",
    replay: Annotated[
        Path | None, typer.Option(help="A file of --journal: run its steps again, and compare the plans.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a workload through the real scheduler and cache, on a clock that only predictions move.

    With --replay a recorded run instead: exit code 1 where a plan differs.
    """
    import msgspec

    if replay is not None:
        _replay(replay, json=json)
        return
    from ridgeline.explain.drafting import parse_acceptance
    from ridgeline.explain.simulation import HEAD
    from ridgeline.explain.simulation import simulate as simulated

    found = simulated(
        config.served(),
        workload=workload,
        trace=trace,
        load=load,
        hardware=hardware,
        goodput=goodput,
        acceptance=parse_acceptance(acceptance),
    )
    if json:
        typer.echo(msgspec.json.encode(found.as_json()))
        return
    typer.echo(f"{found.sentence}\nTimes are {found.provenance}; counts are the scheduler's own.")
    for name, *cells in (HEAD, *found.lines()):
        typer.echo(f"  {name:16}" + "".join(f"{cell:>14}" for cell in cells))
    if good := found.results.goodput:
        share = f"{good.attainment:.1%} of requests meet all objectives"
        typer.echo(f"  goodput {good.requests_per_s:,.3g} requests/s, {share}")


def _replay(path: Path, *, json: bool) -> None:
    import msgspec

    from ridgeline.explain.replaying import replay

    found = replay(path)
    typer.echo(msgspec.json.encode(found) if json else found.sentence)
    if found.difference:
        raise typer.Exit(1)
