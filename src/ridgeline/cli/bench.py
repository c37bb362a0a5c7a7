"""Measure a server (`bench serve`) or an engine in this process (`bench offline`, `bench latency`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ridgeline.cli._compute import Compute, computes
from ridgeline.cli._model import DEFAULT_MODEL, DtypeOption, MaxModelLen, Model

if TYPE_CHECKING:
    from rich.console import Console

    from ridgeline.bench.client import Endpoint
    from ridgeline.bench.load import Load
    from ridgeline.bench.offline import BenchEngine, OfflineRun, System
    from ridgeline.bench.record import RunLog
    from ridgeline.bench.report import Result
    from ridgeline.bench.workload import BenchRequest


class SystemName(StrEnum):  # typer takes no list of Literals
    """Ways to answer a workload in this process."""

    ENGINE = "engine"
    STATIC = "static"
    NAIVE = "naive"


WorkloadSpec = Annotated[
    str, typer.Option("--workload", help="KIND or KIND:option=value,...; kinds are the files of bench/workloads.")
]
Name = Annotated[str, typer.Option(help="Name of the result, part of its file's name.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the JSON: OUT/<hardware>/<date>-<name>.json.")]
Repeats = Annotated[int, typer.Option(help="Timed runs; the median is reported.", min=1)]
Warmups = Annotated[int, typer.Option(help="Runs before the timed ones.", min=0)]

bench = typer.Typer(name="bench", help=__doc__, no_args_is_help=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine of this process that is measured; one field per option, named as the option is."""

    model: Model = DEFAULT_MODEL
    dtype: DtypeOption = "auto"
    num_threads: Annotated[int | None, typer.Option(help="Threads; default: all cores.", min=1)] = None
    max_model_len: MaxModelLen = None
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.", min=1)] = 64
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed in a step.", min=1)] = 512
    block_size: Annotated[int, typer.Option(help="Tokens of a cache block.", min=1)] = 32
    kv_cache_bytes: Annotated[int | None, typer.Option(help="Bytes of the cache; default: chosen.", min=1)] = None
    prefix_caching: Annotated[bool, typer.Option(help="Share equal prefixes of prompts.")] = True

    def open(self, compute: Compute) -> "BenchEngine":
        from ridgeline.bench.offline import BenchEngine
        from ridgeline.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

        return BenchEngine(
            EngineConfig(
                model=ModelConfig(model=self.model, dtype=self.dtype, max_model_len=self.max_model_len),
                cache=CacheConfig(
                    block_size=self.block_size,
                    kv_cache_bytes=self.kv_cache_bytes,
                    prefix_caching=self.prefix_caching,
                    kv_dtype=compute.kv_dtype,
                ),
                scheduler=SchedulerConfig(
                    max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens
                ),
                quantize=compute.quantize_config(),
                backend=compute.backend_config(),
                adapters=compute.adapters(),
                num_threads=self.num_threads,
            )
        )


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server, with or without /v1.")],
    workload: WorkloadSpec = "fixed",
    schedule: Annotated[
        Literal["burst", "poisson", "trace"], typer.Option(help="All at once, at random times, or at the trace's.")
    ] = "burst",
    rate: Annotated[float | None, typer.Option(help="Requests per second, for poisson.")] = None,
    burstiness: Annotated[float, typer.Option(help="Of poisson: below 1 burstier, above 1 more even.")] = 1.0,
    concurrency: Annotated[int | None, typer.Option(help="Most requests under way at once.", min=1)] = None,
    goodput: Annotated[str, typer.Option(help='Objectives in ms, such as "ttft:500 tpot:50".')] = "",
    api: Annotated[
        Literal["completions", "chat"], typer.Option(help="Chat takes workloads of text only.")
    ] = "completions",
    model: Annotated[str | None, typer.Option(help="Model to ask for; default: the first that is listed.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    time_limit_s: Annotated[float, typer.Option(help="Nothing is sent after this many seconds.")] = 3600.0,
    request_timeout_s: Annotated[float, typer.Option(help="A request fails after this many seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the random times.", min=0)] = 0,
    server: Annotated[str, typer.Option(help="What answers, as the result names it.")] = "unnamed server",
    keep_requests: Annotated[bool, typer.Option(help="Keep every request's times in the JSON.")] = False,
    name: Name = "serve",
    out: Out = None,
) -> None:
    """Send a workload to any OpenAI-compatible server; exit code 1 if nothing was answered."""
    import asyncio

    from rich.console import Console

    from ridgeline.bench.client import Endpoint, discover_model
    from ridgeline.bench.load import Load
    from ridgeline.bench.metrics import parse_slos
    from ridgeline.bench.report import build_report, print_report
    from ridgeline.bench.workloads import parse_workload

    console = Console()
    kind, slos = parse_workload(workload), parse_slos(goodput.split())
    load = Load(
        schedule=schedule,
        request_rate_per_s=rate,
        burstiness=burstiness,
        max_concurrency=concurrency,
        time_limit_s=time_limit_s,
        request_timeout_s=request_timeout_s,
        seed=seed,
    )
    endpoint = Endpoint(
        base_url=url,
        model=model or discover_model(url, api_key),
        api=api,
        api_key=api_key,
        temperature=temperature,
    )
    log = asyncio.run(_run_with_progress(console, endpoint, kind.requests(), load))
    report = build_report(
        name=name,
        server=server,
        endpoint=endpoint,
        workload=kind,
        load=load,
        log=log,
        slos=slos,
        keep_requests=keep_requests,
    )
    print_report(console, report)
    _save(console, out, report)
    if not report.results.completed:
        raise typer.Exit(1)


@bench.command()
@computes
def offline(
    tested: EngineOptions,
    compute: Compute,
    workload: WorkloadSpec = "fixed:num_requests=16,input_tokens=256,output_tokens=64",
    system: Annotated[list[SystemName] | None, typer.Option(help="Repeat to compare; default: engine.")] = None,
    batch_size: Annotated[int, typer.Option(help="Of the static system.", min=1)] = 16,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    repeats: Repeats = 3,
    warmups: Warmups = 1,
    name: Name = "offline",
    out: Out = None,
) -> None:
    """Throughput, latencies and the scheduler's cost in this process, beside two baselines where asked."""
    from rich.console import Console

    from ridgeline.bench.offline import measure
    from ridgeline.bench.offline_report import print_offline
    from ridgeline.bench.workloads import parse_workload

    console = Console()
    kind = parse_workload(workload)
    engine = tested.open(compute)

    def on_run(system_name: str, run: "OfflineRun") -> None:
        tokens = sum(map(len, run.token_ids))
        console.print(f"{system_name}: {tokens} tokens in {run.log.duration_s:.2f} s", highlight=False)

    systems = {chosen.value: _system(chosen, engine, batch_size) for chosen in system or [SystemName.ENGINE]}
    report = measure(
        engine,
        systems,
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
@computes
def latency(
    tested: EngineOptions,
    compute: Compute,
    prefill: Annotated[list[int] | None, typer.Option(help="Prompt length; repeat for more. Default: 512.")] = None,
    decode: Annotated[list[int] | None, typer.Option(help="Batch; repeat for more. Default: 1, 4, 16.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Of each decoding sequence.", min=1)] = 16,
    output_tokens: Annotated[int, typer.Option(help="Decoded by each sequence.", min=1)] = 64,
    repeats: Repeats = 3,
    warmups: Warmups = 1,
    name: Name = "latency",
    out: Out = None,
) -> None:
    """Prefill and decode apart, as llama-bench's pp and tg."""
    from rich.console import Console

    from ridgeline.bench.latency import measure_latency
    from ridgeline.bench.offline_report import print_latency

    console = Console()
    engine = tested.open(compute)
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


def _system(name: SystemName, engine: "BenchEngine", batch_size: int) -> "System":
    from ridgeline.bench.baselines import NaiveGeneration, StaticBatching

    match name:
        case SystemName.ENGINE:
            return engine
        case SystemName.STATIC:
            return StaticBatching(engine, batch_size)
        case SystemName.NAIVE:
            return NaiveGeneration(engine)


async def _run_with_progress(
    console: "Console", endpoint: "Endpoint", requests: "Sequence[BenchRequest]", load: "Load"
) -> "RunLog":
    from rich.progress import Progress

    from ridgeline.bench.client import run_load

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("requests", total=len(requests))
        return await run_load(endpoint, requests, load, on_record=lambda record: bar.advance(task))


def _save(console: "Console", out: Path | None, report: "Result") -> None:
    from ridgeline.bench.report import save_report

    if out is not None:
        path = save_report(out, report)
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
