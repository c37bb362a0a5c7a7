"""Say what inference costs at least: explorers of one idea each, and the numbers of lectures recomputed."""

import inspect
import json as json_format
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from ridgeline.explain import explorers

explain = typer.Typer(no_args_is_help=True)

PricedModel = Annotated[
    str, typer.Argument(help="A config.json, its folder, a bundled model, or llama-3-70b and such.")
]
ContextOption = Annotated[int, typer.Option(min=1, help="Tokens of each in a decode step.")]
PromptOption = Annotated[int, typer.Option(min=0, help="Tokens of a prompt: a prefill step instead.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@explain.callback()
def _explain() -> None:
    """Say what inference costs at least, and why."""


@explain.command()
def lecture(
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="One row, with its inputs. Default: all.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: a row, or a list of all.")] = False,
) -> None:
    """Print numbers that texts on inference name, recomputed from their inputs; ✗ marks a slip."""
    from ridgeline.explain import lectures
    from ridgeline.explain.lectures.row import STATUSES

    rows = lectures.rows() if id is None else [lectures.find(id)]
    if json:
        plain = [row.as_json() for row in rows]
        typer.echo(json_format.dumps(plain if id is None else plain[0], ensure_ascii=False))
        return
    for row in rows:
        typer.echo(f"{row.status:3} {row.id:16} {row.texts:8} {row.says}\n{'':29}{row.sentence()} [{row.provenance}]")
        if id is not None:
            inputs = ", ".join(f"{name} = {value}" for name, value in row.inputs.items())
            typer.echo(f"{'':29}{row.derivation}; inputs: {inputs}")
    typer.echo("\n" + " · ".join(f"{mark} {what}" for mark, what in STATUSES.items()))


@explain.command()
def practice(
    name: Annotated[str | None, typer.Argument(metavar="[EXPLORER]", help="One question. Default: all.")] = None,
    answers: Annotated[
        bool, typer.Option("--answers", help="Say which is right, and how the others come about.")
    ] = False,
) -> None:
    """Ask a question for each explorer; its answers are computed."""
    from ridgeline.explain.practice import questions

    if name is not None:
        explorers.summary(name)
    for question in questions():
        if name in (None, question.explorer):
            typer.echo(f"{question.explorer}: {question.ask}")
            for answer in question.answers:
                mark = "✓" if answer.is_right else "✗"
                typer.echo(f"  {mark} {answer.figure.text:16} {answer.why}" if answers else f"  {answer.figure.text}")


@explain.command()
def price(
    model: PricedModel,
    card: Annotated[str, typer.Option(help="A datasheet, NAME or NAME:COUNT.")] = "h100-sxm",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of the step.")] = 1,
    context: ContextOption = 1024,
    prompt: PromptOption = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    json: JsonOption = False,
) -> None:
    """Print what a step of a model costs on a card at least, by kind of group."""
    from ridgeline.explain.pricing import HEAD
    from ridgeline.explain.pricing import price as price_of

    found = price_of(model, card=card, batch=batch, context=context, prompt=prompt, dtype=dtype)
    _show(found, (HEAD, *found.lines()), json, "  {:16}", "{:>14}")


@explain.command()
def devices(
    model: PricedModel,
    card: Annotated[str, typer.Option(help="A datasheet.")] = "h100-sxm",
    count: Annotated[int, typer.Option(min=2, help="How many of it.")] = 8,
    batch: Annotated[int, typer.Option(min=2, help="Sequences of the step, on all of them.")] = 16,
    context: ContextOption = 1024,
    prompt: PromptOption = 0,
    link_us: Annotated[float, typer.Option(min=0, help="Latency of a message between two, in microseconds.")] = 0.0,
    json: JsonOption = False,
) -> None:
    """Print what a step costs at least on several cards: replicas, tensor and pipeline parallelism."""
    from ridgeline.explain.spreading import HEAD
    from ridgeline.explain.spreading import devices as ways_of

    found = ways_of(model, card=card, count=count, batch=batch, context=context, prompt=prompt, link_s=link_us * 1e-6)
    _show(found, (HEAD, *(way.cells for way in found.ways)), json, "  {:31}", "{:>18}")


def _show(found: Any, rows: Iterable[Sequence[str]], json: bool, name: str, cell: str) -> None:
    """Print what is found as JSON, or its sentence and a table."""
    table = "".join("\n" + name.format(first) + "".join(map(cell.format, cells)) for first, *cells in rows)
    typer.echo(
        json_format.dumps(found.as_json(), ensure_ascii=False) if json else f"{found.sentence} [datasheet]{table}"
    )


def _explorer(name: str) -> Callable[[typer.Context], None]:
    """Return a command that imports the explorer once it is asked for, and lets it read its own options."""

    def run(ctx: typer.Context) -> None:
        app = typer.Typer(add_completion=False)
        app.command(help=explorers.summary(name))(_command(name))
        typer.main.get_command(app).main(args=ctx.args, prog_name=ctx.command_path, standalone_mode=False)

    return run


def _command(name: str) -> Callable[..., None]:
    """Return a function with an option for every input of an explorer."""

    def run(json: bool, **inputs: Any) -> None:
        result = explorers.explore(name, **inputs)
        if json:
            typer.echo(json_format.dumps(result.as_json(), ensure_ascii=False))
            return
        typer.echo(result.sentence)
        for figure in result.figures:
            typer.echo(f"  {figure.name:18} {figure.text:>18}   {figure.formula} [{figure.provenance}]")
        for grid in result.grids:
            typer.echo("\n".join((f"{grid.name}:", *(f"  {line}" for line in grid.lines))))

    flag = Annotated[bool, typer.Option("--json", help="Print one JSON object, with the series to draw.")]
    parameters = [_option(parameter) for parameter in explorers.inputs_of(name).values()]
    parameters.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=flag))
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return an explorer's input as an option with the same range and description."""
    (meta,), kind = parameter.annotation.__metadata__, parameter.annotation.__origin__
    kind = kind if isinstance(kind, type) else type(parameter.default)  # of a Literal; the explorer checks which
    option = typer.Option("--" + parameter.name.replace("_", "-"), min=meta.ge, max=meta.le, help=meta.description)
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option])


for _name in explorers.names():
    explain.command(
        _name,
        help=explorers.summary(_name),
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(_explorer(_name))
