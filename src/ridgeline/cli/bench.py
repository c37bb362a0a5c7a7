"""Measure a server (`bench serve`) or an engine in this process (`bench offline`, `bench latency`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ridgeline.bench.load import Load
from ridgeline.cli._options import GoodputOption, WorkloadOption, with_options
from ridgeline.core.config import EngineConfig
from ridgeline.core.words import counted

if TYPE_CHECKING:
    from ridgeline.bench.offline import OfflineRun
    from ridgeline.bench.report import Report


def _fit_name(name: str) -> str:
    from ridgeline.bench.report import fit_name

    return fit_name(name)


def _writable(out: Path | None) -> Path | None:
    from ridgeline.bench.report import writable

    return writable(out)


Name = Annotated[str, typer.Option(help="Name of the result, part of its file's name.", callback=_fit_name)]
Out = Annotated[
    Path | None,
    typer.Option(help="Write the result as JSON to OUT/<hardware>/<date>-<name>.json.", callback=_writable),
]
Repeats = Annotated[int, typer.Option(help="Number of timed runs; the median is reported.", min=1)]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
]
Warmups = Annotated[int, typer.Option(help="Number of untimed runs before them.", min=0)]

bench = typer.Typer(name="bench", help=__doc__, no_args_is_help=True)


# What these measurements leave alone: they generate, and put everything into the queue at once.
ENGINE_ONLY = with_options(without={"task", "scheduling_policy", "max_itl_s", "max_itl_ratio"})


@bench.command()
@with_options()
def serve(
    load: Load,
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server, with or without /v1.")],
    workload: WorkloadOption = "fixed",
    goodput: GoodputOption = "",
    api: Annotated[
        Literal["completions", "chat"], typer.Option(help="Endpoint to use; chat takes workloads of text only.")
    ] = "completions",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to ask for. Default: the first that the server lists.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RIDGELINE_API_KEY", help="Key to send as a bearer token.")
    ] = None,
    temperature: Temperature = 0.0,
    server: Annotated[str, typer.Option(help="Name of the server in the result.")] = "unnamed server",
    keep_requests: Annotated[bool, typer.Option(help="Write every request's times to the JSON.")] = False,
    name: Name = "serve",
    out: Out = None,
) -> None:
    """Send a workload to any OpenAI-compatible server; exit code 1 if nothing was answered."""
    import asyncio

    from rich.progress import Progress

    from ridgeline.bench.client import Endpoint, discover_model, run_load
    from ridgeline.bench.metrics import steady_state, summarize
    from ridgeline.bench.report import BenchReport, print_report
    from ridgeline.bench.workloads import describe_workload, parse_workload
    from ridgeline.core.slo import parse_slos

    console = Console()
    kind, slos = parse_workload(workload), parse_slos(goodput)
    endpoint = Endpoint(
        base_url=url, model=model or discover_model(url, api_key), api=api, api_key=api_key, temperature=temperature
    )
    requests = kind.requests()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("requests", total=len(requests))
        log = asyncio.run(run_load(endpoint, requests, load, on_record=lambda record: bar.advance(task)))
    report = BenchReport(
        name=name,
        server=server,
        api=api,
        model=endpoint.model,
        workload=describe_workload(kind),
        load=load,
        results=summarize(log, slos),
        steady_state=steady_state(log),
        requests=log.records if keep_requests else None,
    )
    print_report(console, report)
    _save(console, out, report)
    if not report.results.completed:
        raise typer.Exit(1)


@bench.command()
@ENGINE_ONLY
def offline(
    config: EngineConfig,
    workload: WorkloadOption = "fixed:num_requests=16,input_tokens=256,output_tokens=64",
    temperature: Temperature = 0.0,
    repeats: Repeats = 3,
    warmups: Warmups = 1,
    name: Name = "offline",
    out: Out = None,
) -> None:
    """Measure throughput, latencies and the scheduler's cost in this process."""
    from ridgeline.bench.offline import BenchEngine, measure
    from ridgeline.bench.offline_report import print_offline
    from ridgeline.bench.workloads import parse_workload

    console = Console()
    kind = parse_workload(workload)
    engine = BenchEngine(config)

    def on_run(system_name: str, run: "OfflineRun") -> None:
        tokens = sum(map(len, run.token_ids))
        console.print(f"{system_name}: {counted(tokens, 'token')} in {run.log.duration_s:.2f} s", highlight=False)

    report = measure(
        engine,
        {"engine": engine.run},
        kind,
        name=name,
        repeats=repeats,
        warmups=warmups,
        temperature=temperature,
        on_run=on_run,
    )
    print_offline(console, report)
    _save(console, out, report)


@bench.command()
@ENGINE_ONLY
def latency(
    config: EngineConfig,
    prefill: Annotated[
        list[int] | None, typer.Option(help="Prompt length of the prefill; may be given several times. Default: 512.")
    ] = None,
    decode: Annotated[
        list[int] | None, typer.Option(help="Batch size of the decode; may be given several times. Default: 1, 4, 16.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt length of each decoding sequence.", min=1)] = 16,
    output_tokens: Annotated[int, typer.Option(help="Number of tokens that each sequence decodes.", min=1)] = 64,
    repeats: Repeats = 3,
    warmups: Warmups = 1,
    name: Name = "latency",
    out: Out = None,
) -> None:
    """Measure prefill and decode apart, as llama-bench's pp and tg."""
    from ridgeline.bench.offline import BenchEngine, measure_latency
    from ridgeline.bench.offline_report import print_latency

    console = Console()
    engine = BenchEngine(config)
    report = measure_latency(
        engine,
        name=name,
        prefill=prefill or [512],
        decode=decode or [1, 4, 16],
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        warmups=warmups,
    )
    print_latency(console, report)
    _save(console, out, report)


@bench.command()
@ENGINE_ONLY
def ablate(
    config: EngineConfig,
    workload: WorkloadOption = "fixed:num_requests=16,input_tokens=128,output_tokens=32",
    techniques: Annotated[
        str,
        typer.Option(help="Switch native, kv_cache, batching, continuous, chunked, prefix, int8, int4, speculation."),
    ] = "kv_cache,batching,continuous,prefix,int8",
    all_subsets: Annotated[
        bool, typer.Option("--all-subsets", help="Measure every feasible subset, for Shapley values.")
    ] = False,
    repeats: Repeats = 3,
    name: Name = "ablate",
    out: Out = None,
) -> None:
    """Measure what each technique of a speed-up is worth behind those before it, and what is lost without it."""
    from ridgeline.bench.ablate import ablate as dissect
    from ridgeline.bench.report import numbers_table
    from ridgeline.bench.workloads import parse_workload

    console = Console()

    def on_run(techniques: frozenset[str], rate: float) -> None:
        console.print(f"{' '.join(sorted(techniques)) or 'nothing'}: {rate:,.1f} tokens/s", highlight=False)

    wanted, kind = [each.strip() for each in techniques.split(",") if each.strip()], parse_workload(workload)
    report = dissect(config, kind, wanted, name=name, repeats=repeats, all_subsets=all_subsets, on_run=on_run)
    total = report.total
    title = f"{total.median:.1f} times as fast as nothing of it ({total.min:.1f} to {total.max:.1f})"
    table = numbers_table(title, "", "sequential", "range", "marginal", "Shapley", "outputs")
    for each in report.contributions:
        one = each.sequential
        shapley = "" if each.shapley is None else f"{each.shapley:.2f}×"
        cells = f"{one.median:.2f}×", f"{one.min:.2f} to {one.max:.2f}", f"{each.marginal:.2f}×", shapley
        table.add_row(each.words, *cells, "others" if each.is_lossy else "the same")
    console.print(table)
    _save(console, out, report)


def _save(console: Console, out: Path | None, report: "Report") -> None:
    from ridgeline.bench.report import save_report

    if out is not None:
        path = save_report(out, report)
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
