"""The command line, `ridgeline COMMAND`, has one file here per command.

A file has a function of its name, or a typer.Typer where there are subcommands; the first line of its docstring is its
line in the list. It is imported when the command is run or asked for help, and imports what it needs within its
function, so that help never waits for torch. Files that start with an underscore are shared by commands.
"""

import ast
import importlib
import io
import logging
import pkgutil
import re
import sys
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ridgeline import __version__
from ridgeline.core.errors import NO_MEMORY, TORCH_IS_MISSING, ConfigError, ModelLoadError, RequestError, RidgelineError

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which newer typer holds a copy of
EXIT_OTHER, EXIT_REQUEST, EXIT_MODEL, EXIT_INTERRUPT = 1, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script; always ends in SystemExit: 0, 1, 2 (options, requests), 3 (model files), 130 (Ctrl-C)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        code = _app(arguments)(args=arguments, prog_name="ridgeline", standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            typer.echo(f"ridgeline: {_usage(error)}", err=True)
        raise SystemExit(EXIT_REQUEST) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def names() -> list[str]:
    """Return the names of all commands: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def _usage(error: Any) -> str:
    """Say in one line what was typed wrong, and the line to type instead."""
    from ridgeline.core.config import EngineConfig
    from ridgeline.core.options import suggestion, table
    from ridgeline.core.params import SamplingParams

    path = "ridgeline" if error.ctx is None else error.ctx.command_path
    message = " ".join(error.format_message().split()).rstrip(".")
    if error.ctx and (name := getattr(error, "option_name", None)) and "No such option" in message:
        known = {flag for parameter in error.ctx.command.params for flag in parameter.opts}
        rows = (row for owner in (EngineConfig, SamplingParams) for row in table(owner) if row.flag in known)
        if row := suggestion(name, rows):
            message = f"No such option: {name}. Did you mean {row.flag}?"
    return f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} Try: {path} --help"


class _Commands(TyperGroup):
    """Turn our errors into one line and an exit code; a bug of ours still shows its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(EXIT_INTERRUPT) from None
        except RidgelineError as error:
            typer.echo(f"ridgeline: {error}", err=True)
            is_request = isinstance(error, (ConfigError, RequestError))
            code = EXIT_REQUEST if is_request else EXIT_MODEL if isinstance(error, ModelLoadError) else EXIT_OTHER
            raise SystemExit(code) from None
        except MemoryError:
            typer.echo(f"ridgeline: {NO_MEMORY}", err=True)
            raise SystemExit(EXIT_OTHER) from None
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            typer.echo(f"ridgeline: {TORCH_IS_MISSING}", err=True)
            raise SystemExit(EXIT_REQUEST) from None


def _app(arguments: Sequence[str]) -> typer.Typer:
    """Make the application, in which only the command that `arguments` ask for is more than a name and a summary."""
    app = typer.Typer(cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_common)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name in names():
        command = getattr(importlib.import_module(f"{__name__}.{name}"), name) if name == asked else _not_imported
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            help = _summary(name) if command is _not_imported else cleandoc(command.__doc__ or "")
            app.command(name, help=re.sub(r"(?<!\n)\n(?!\n)", " ", help))(command)  # a paragraph is one line
    return app


def _summary(name: str) -> str:
    """Return the first line of a command module's docstring, read without running the module."""
    source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _not_imported() -> None:
    raise AssertionError("stands for a command that was not asked for")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ridgeline {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what was chosen automatically, and why.")
    ] = False,
) -> None:
    """Runs large language models, serves them over an OpenAI-compatible API, and says what they cost."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ridgeline").setLevel(logging.INFO if verbose else logging.WARNING)
