"""Serve a model over an OpenAI-compatible HTTP API."""

import logging
from enum import StrEnum
from typing import Annotated

import typer

from ridgeline.cli._compute import Compute, computes
from ridgeline.cli._model import DEFAULT_MODEL, DtypeOption, MaxModelLen
from ridgeline.core.collector import long_lived_imports
from ridgeline.core.config import SchedulingPolicy

BIND_EXIT = 4


class LogLevel(StrEnum):
    """How much is logged; a request is one line at `info`."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@computes
def serve(
    compute: Compute,
    model: Annotated[str, typer.Argument(help="A folder, .gguf file, bundled model or hub id.")] = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="RIDGELINE_API_KEY", help="Key that clients must send. Default: none is asked.")
    ] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Listen beyond this machine without an API key.")
    ] = False,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in the API. May be given several times.")
    ] = None,
    dtype: DtypeOption = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences that run at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 512,
    max_queued_requests: Annotated[int, typer.Option(help="Most requests that wait; more are refused.")] = 1024,
    scheduling_policy: Annotated[
        SchedulingPolicy, typer.Option(help="First come, first served, or by each request's priority (lower first).")
    ] = "fcfs",
    block_size: Annotated[int, typer.Option(help="Tokens in one block of the KV cache.")] = 32,
    kv_cache_bytes: Annotated[
        int | None, typer.Option(help="Size of the KV cache. Default: enough for the sequences, within free memory.")
    ] = None,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Compute every prompt from its start.")
    ] = False,
    num_threads: Annotated[int | None, typer.Option(help="Compute threads. Default: one per usable core.")] = None,
    request_timeout: Annotated[float, typer.Option(help="Seconds a request may take, queue included.")] = 600.0,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds that open requests get after SIGTERM.")] = 30.0,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe messages to log.")] = LogLevel.info,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Ends on SIGTERM or Ctrl-C, when the open requests have ended; a second one ends it at once. Exit codes: 0, 1 for
    requests cut off by the shutdown timeout, 2 for options, 3 for model files, 4 for an address that cannot be used.
    """
    from ridgeline.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
    from ridgeline.server.listen import bind, url_of
    from ridgeline.server.settings import ServerSettings, require_safe_host

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("ridgeline").setLevel(log_level.upper())
    require_safe_host(host, api_key=api_key, insecure_no_auth=insecure_no_auth)
    settings = ServerSettings(
        served_model_names=tuple(served_model_name or ()),
        api_key=api_key,
        request_timeout_s=request_timeout,
        shutdown_timeout_s=shutdown_timeout,
    )
    config = EngineConfig(
        model=ModelConfig(model=model, dtype=dtype, max_model_len=max_model_len),
        cache=CacheConfig(
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            prefix_caching=not no_prefix_caching,
            kv_dtype=compute.kv_dtype,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=scheduling_policy,
            max_queued_requests=max_queued_requests,
        ),
        quantize=compute.quantize_config(),
        backend=compute.backend_config(),
        adapters=compute.adapters(),
        num_threads=num_threads,
    )
    try:
        listener = bind(host, port)
    except (OSError, UnicodeError) as error:
        typer.echo(f"ridgeline: cannot listen on {host} port {port}: {error}; choose another with --port", err=True)
        raise SystemExit(BIND_EXIT) from None
    with long_lived_imports():
        from ridgeline.engine.async_engine import AsyncEngine
        from ridgeline.server.app import create_app
        from ridgeline.server.run import run

    with listener:
        app = create_app(AsyncEngine(config), settings)
        names = ", ".join(app.state.service.model_names)
        raise SystemExit(run(app, listener, lambda: typer.echo(f"Ridgeline serves {names} at {url_of(listener)}/v1")))
