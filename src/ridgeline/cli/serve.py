"""Serve a model over an OpenAI-compatible HTTP API."""

import os
import signal
import socket
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from ridgeline.cli._effective import effective_options
from ridgeline.cli._options import default_model, with_options
from ridgeline.core.collector import long_lived_imports
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.log import LogFormat, set_up
from ridgeline.core.options import table
from ridgeline.server.settings import ServerSettings, only_local_names, require_safe_host

BIND_EXIT = 4
ROUNDED_KV = ("int8", "fp8", "int4")
PLANNED = ("max_num_seqs", "max_num_batched_tokens")  # for --slo, where they are not given


def _from_file(context: typer.Context, path: Path | None) -> None:
    """Take options from a TOML file, by the names of flags; those that are given come first. Raises ConfigError."""
    try:
        given = {} if path is None else tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    context.default_map = {name.replace("-", "_"): value for name, value in given.items()}
    if unknown := context.default_map.keys() - {each.name for each in context.command.params}:
        raise ConfigError(f"--config {path}: there is no option {', '.join(sorted(unknown))}")


FILE = typer.Option("--config", is_eager=True, callback=_from_file, help="TOML of options.", metavar="FILE")


@with_options(default=default_model)
def serve(
    settings: ServerSettings,
    config: EngineConfig,
    context: typer.Context,
    config_file: Annotated[Path | None, FILE] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8000,
    uds: Annotated[str | None, typer.Option(help="Unix socket to listen on instead.", metavar="PATH")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="RIDGELINE_API_KEY", help="Key that clients must send. Default: none is asked for."),
    ] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Listen beyond this machine without an API key.")
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Least severe messages to log; a request is one line at info."),
    ] = "info",
    log_format: Annotated[
        LogFormat, typer.Option(help="Lines of text, or JSON with a request's id and counts.")
    ] = "text",
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options as TOML, with where each was set, and end.")
    ] = False,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Ends on SIGTERM or Ctrl-C, when the open requests have ended; a second one ends it at once. Exit codes: 0, 1 for
    requests cut off by the shutdown timeout and a lack of memory, 2 for options, 3 for model files, 4 for an address
    that cannot be used, 5 for an engine that died or hangs.
    """
    from ridgeline.server.listen import bind, bind_unix

    if print_config:
        typer.echo(effective_options(context, config))
        return
    set_up(log_format, log_level.upper())
    settings = replace(settings, api_key=api_key)
    if settings.kv_canary and config.cache.kv_dtype not in ROUNDED_KV:
        raise ConfigError(f"--kv-canary is for a --kv-dtype of {', '.join(ROUNDED_KV)}; give one, or leave it out")
    if uds is None:
        require_safe_host(host, has_keys=settings.has_keys, insecure_no_auth=insecure_no_auth)
        settings = only_local_names(settings, host)
    try:
        listener = bind(host, port) if uds is None else bind_unix(Path(uds))
    except (OSError, UnicodeError) as error:
        where, fix = (f"{host} port {port}", "--port") if uds is None else (uds, "--uds")
        typer.echo(f"ridgeline: cannot listen on {where}: {error}; choose another with {fix}", err=True)
        raise SystemExit(BIND_EXIT) from None
    with listener:
        config = config.served()
        if settings.slos and (left_open := [name for name in PLANNED if context.params[name] is None]):
            from ridgeline.explain.start import planned

            config = planned(config, settings.slos, left_open)
        _serve(settings, config.drafting(), listener, uds)


def _numbers(config: EngineConfig) -> dict[str, str | int | bool]:
    """Return the options that change numbers, but for those of keys and values."""
    asked = {row.name: getattr(getattr(config, row.part), row.field) for row in table(EngineConfig) if row.part}
    shared = {name: value for name, value in asked.items() if name == "dtype" or name.startswith("quantize")}
    return {name: value for name, value in shared.items() if value is not None}


def _end_at_once(uds: str | None) -> NoReturn:
    """End while the model is loaded. An exception would be lost where the signal comes within a finalizer."""
    if uds is not None:
        Path(uds).unlink(missing_ok=True)
    os._exit(0)


def _serve(settings: ServerSettings, config: EngineConfig, listener: socket.socket, uds: str | None) -> NoReturn:
    """Serve until a signal or the engine's end, and end with its exit code."""
    from ridgeline.server.listen import url_of

    # Until `run` takes them: what SIGHUP reads again is read later, and a container's process 1 would not end.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: _end_at_once(uds))
    with long_lived_imports():
        if settings.engine_process:
            from ridgeline.engine.process.client import ProcessEngine as Engine
        else:
            from ridgeline.engine.thread_engine import ThreadEngine as Engine
        from ridgeline.server.app import create_app
        from ridgeline.server.run import run

    engine = Engine(config)
    app = create_app(engine, engine.tokenizer, settings)
    if settings.kv_canary:
        from ridgeline.server.canary import Canary

        kv_dtype = config.cache.kv_dtype
        app.state.service.watch_with(Canary(settings.kv_canary, config.model.model, _numbers(config), kv_dtype))
    names = ", ".join(app.state.service.model_names)
    url = url_of(listener, tls=settings.tls_cert is not None)
    try:
        pages = "" if uds is not None else f"\nIn a browser: {url}/ui"
        code = run(app, listener, lambda: typer.echo(f"Ridgeline serves {names} at {url}/v1{pages}"))
    finally:
        if uds is not None:
            Path(uds).unlink(missing_ok=True)
    raise SystemExit(code)
