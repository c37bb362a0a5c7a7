"""Serve a model over an OpenAI-compatible HTTP API."""

import logging
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from ridgeline.cli._options import default_model, with_options
from ridgeline.core.collector import long_lived_imports
from ridgeline.core.config import EngineConfig
from ridgeline.server.settings import ServerSettings, require_safe_host

BIND_EXIT = 4


class LogLevel(StrEnum):
    """How much is logged; a request is one line at `info`."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@with_options(default=default_model)
def serve(
    settings: ServerSettings,
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="RIDGELINE_API_KEY", help="Key that clients must send. Default: none is asked for."),
    ] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Listen beyond this machine without an API key.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe messages to log.")] = LogLevel.info,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Ends on SIGTERM or Ctrl-C, when the open requests have ended; a second one ends it at once. Exit codes: 0, 1 for
    requests cut off by the shutdown timeout, 2 for options, 3 for model files, 4 for an address that cannot be used.
    """
    from ridgeline.server.listen import bind, url_of

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("ridgeline").setLevel(log_level.upper())
    require_safe_host(host, api_key=api_key, insecure_no_auth=insecure_no_auth)
    settings = replace(settings, api_key=api_key)
    try:
        listener = bind(host, port)
    except (OSError, UnicodeError) as error:
        typer.echo(f"ridgeline: cannot listen on {host} port {port}: {error}; choose another with --port", err=True)
        raise SystemExit(BIND_EXIT) from None
    with long_lived_imports():
        from ridgeline.engine.thread_engine import ThreadEngine
        from ridgeline.server.app import create_app
        from ridgeline.server.run import run

    with listener:
        engine = ThreadEngine(config)
        app = create_app(engine, engine.tokenizer, settings)
        names = ", ".join(app.state.service.model_names)
        raise SystemExit(run(app, listener, lambda: typer.echo(f"Ridgeline serves {names} at {url_of(listener)}/v1")))
