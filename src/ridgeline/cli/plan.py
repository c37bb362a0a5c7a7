"""Find the options that meet an objective on a machine, and check them."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from ridgeline.bench.load import Load
from ridgeline.cli._options import AcceptanceOption, HardwareOption, TraceOption, WorkloadOption, with_options
from ridgeline.core.config import EngineConfig

LEFT_OUT = {"time_limit_s", "request_timeout_s", "journal", "task", "max_num_seqs"}


@with_options(without=LEFT_OUT | {"max_num_batched_tokens"})
def plan(
    load: Load,
    config: EngineConfig,
    slo: Annotated[
        str, typer.Option(help="Objectives for 95 % of requests, such as ttft=500ms,tpot=50ms. Default: throughput.")
    ] = "",
    workload: WorkloadOption = "fixed:num_requests=64,input_tokens=256,output_tokens=64",
    trace: TraceOption = None,
    hardware: HardwareOption = "this",
    allow: Annotated[
        str, typer.Option(help="Precisions that may be chosen, by commas: int8, int4, kv-int8, kv-fp8, kv-int4.")
    ] = "",
    acceptance: AcceptanceOption = "",
    verify: Annotated[bool, typer.Option("--verify", help="Run the plan here, and print what was measured.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the options with which a model serves a workload within objectives.

    Exit code 1 where nothing searched meets them, and 3 where a verified figure is off by more than 15 %.
    """
    import msgspec

    from ridgeline.bench.metrics import summarize
    from ridgeline.core.errors import ConfigError
    from ridgeline.core.slo import parse_slos
    from ridgeline.core.words import counted
    from ridgeline.explain.drafting import parse_acceptance
    from ridgeline.explain.planner import HEAD, VERIFIED, compared, run_here
    from ridgeline.explain.planner import plan as planned
    from ridgeline.explain.simulation import requests_of

    if verify and hardware != "this":
        raise ConfigError(f"--verify runs the plan on this machine, and it is for {hardware}")
    slos = parse_slos(slo)
    requests = requests_of(config, workload, trace, load)
    users, allowed = load.max_concurrency, [name.strip() for name in allow.split(",") if name.strip()]
    how = partial(planned, config, requests, slos=slos, hardware=hardware, allow=allowed, max_concurrency=users)
    found = how(acceptance=parse_acceptance(acceptance))
    pairs: Sequence[tuple[str, float, float]] = ()
    if verify and found.is_met:
        pairs = compared(found, summarize(run_here(found.chosen.config, requests, users)))
    is_off = any(abs(predicted / measured - 1) > VERIFIED for _, predicted, measured in pairs)
    if json:
        figures = [{"figure": name, "predicted": one, "measured": other} for name, one, other in pairs]
        typer.echo(msgspec.json.encode({**found.as_json(), "verified": figures}))
    else:
        typer.echo(f"{found.sentence} [{found.chosen.provenance}]")
        for reason in (*filter(None, [found.command]), *found.reasons):
            typer.echo(f"  {reason}")
        sizes = ", ".join(f"{name.replace('_', ' ')} {size / 1e6:,.0f} MB" for name, size in found.memory.items())
        candidates = counted(len(found.candidates), "candidate")
        typer.echo(f"  memory: {sizes}\nNo other of {candidates} is faster for all and for each:")
        for name, *cells in (HEAD, *(each.line() for each in found.front)):
            typer.echo(f"  {name:52}" + "".join(f"{cell:>24}" for cell in cells))
        for name, one, other in pairs:
            typer.echo(f"  {name:16} predicted {one:10,.2f}   measured {other:10,.2f}   {one / other - 1:+.1%}")
    if is_off or not found.is_met:
        raise typer.Exit(3 if found.is_met else 1)
