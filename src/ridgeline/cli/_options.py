"""Makes a command's options from the tables of options, and the tables' values from what was typed.

A command asks for them by the types of its parameters, under the decorator `with_options`: an EngineConfig brings MODEL
and the options of the engine, Sampling those of SamplingParams, any other dataclass its own.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, get_args, get_origin, get_type_hints

import typer

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.options import Row, table
from ridgeline.core.params import RECOMMENDED, DiffusionParams, SamplingParams, StructuredOutputsParams

Sampling = NewType("Sampling", dict[str, object])  # the parameters that were given, by name
MAX_SHOWN = 2**31 - 1  # from here on a bound is only an integer's width
MODEL_HELP = "A model folder, a .gguf file, a Hugging Face id or a bundled model's name."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="The same as MODEL.")]
MODEL_PARAMETERS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
    for name, hint in (("model", ModelArgument), ("model_option", ModelOption))
]
WorkloadOption = Annotated[
    str, typer.Option(help="Requests: KIND or KIND:option=value,...; kinds are the files of bench/workloads.")
]
GoodputOption = Annotated[
    str, typer.Option(help="Objectives that a request must meet, such as ttft=500ms,tpot=50ms; e2el is the third.")
]
TraceOption = Annotated[
    Path | None, typer.Option(help="A trace, Azure's .csv or Mooncake's .jsonl, at its own times: a --workload.")
]
AcceptanceOption = Annotated[
    str, typer.Option(help="Share of right tokens of --speculate's drafts, behind right ones: 0.7, or 0.8,0.7,0.6.")
]
HardwareOption = Annotated[
    str, typer.Option(help="this: the machine here, as it was calibrated; or a datasheet, NAME or NAME:COUNT.")
]


@dataclass(frozen=True, slots=True)
class _Group:
    """The options that are made of one parameter of a command."""

    parameter: str
    owner: type
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, parameter: str, hint: Any, without: Collection[str]) -> "_Group | None":
        """Return None where the parameter is an option of the command's own."""
        owner = SamplingParams if hint is Sampling else hint
        if not is_dataclass(owner):
            return None
        assert isinstance(owner, type)
        return cls(parameter, owner, tuple(row for row in table(owner) if _identifier(row) not in without))

    def build(self, given: Mapping[str, Any]) -> object:
        """Make what the command asked for. Raises ConfigError and RequestError for values out of range."""
        typed = [(row, given[_identifier(row)]) for row in self.rows]
        values = [(row, _parse(row, value)) for row, value in typed if value is not None]
        if self.owner is EngineConfig:
            return EngineConfig.of(given["model"], **{row.name: value for row, value in values})
        own = {row.field: value for row, value in values if row.part is None}
        if self.owner is not SamplingParams:
            return self.owner(**own)
        parts: dict[str, dict[str, Any]] = {}
        for row, value in values:
            if row.part is not None:
                parts.setdefault(row.part, {})[row.field] = value
        owners = {"diffusion": DiffusionParams, "structured_outputs": StructuredOutputsParams}
        return Sampling(own | {part: owners[part](**fields) for part, fields in parts.items()})


def bundled_model() -> str:
    """Name the model that is always here."""
    return "python-9m"


def default_model() -> str:
    """Name the small chat model where it was fetched, else the bundled one."""
    from ridgeline.weights.fetch import fetched

    return "smollm2" if fetched("smollm2") else bundled_model()


def default_chat_model() -> str:
    """Name the small chat model. Raises ConfigError where it was not fetched: the bundled one cannot chat."""
    model = default_model()
    if model == bundled_model():
        raise ConfigError(
            f"no chat model is here yet, and the bundled {model} only continues Python. Fetch one (98 MB): "
            "ridgeline pull smollm2"
        )
    return model


def with_options(
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, str] | None = None,
    after: Sequence[str] = (),
    default: Callable[[], str] = bundled_model,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that its parameters ask for, but those in `without`.

    If two options have one name (`--seed` of sampling and of the engine) it gets the one that is asked for first.
    `defaults` are what help says where the command's default is its own. `after` names the arguments that may follow
    MODEL: they come first where the model is given by --model. `default` names the model where none was given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        hints = get_type_hints(command, include_extras=True)
        groups: list[_Group] = []
        for name in signature.parameters:
            if group := _Group.of(name, hints[name], {*without, *(_identifier(r) for g in groups for r in g.rows)}):
                groups.append(group)
        taken = {group.parameter for group in groups}
        own = [p.replace(annotation=hints[n]) for n, p in signature.parameters.items() if n not in taken]
        has_model = any(group.owner is EngineConfig for group in groups)
        parameters = [*(MODEL_PARAMETERS if has_model else ()), *own]
        parameters += [_parameter(row, defaults or {}) for group in groups for row in group.rows]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            if has_model:
                _settle_model(given, after, default)
            made = {group.parameter: group.build(given) for group in groups}
            command(**{p.name: given[p.name] for p in own}, **made)

        run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def chosen_model(model: str | None, model_option: str | None) -> str | None:
    """Return the model of the argument or of --model. Raises ConfigError where both were given."""
    if model is not None and model_option is not None:
        raise ConfigError(f"two models were given, {model!r} and --model {model_option!r}; give one")
    return model if model_option is None else model_option


def _settle_model(given: dict[str, Any], after: Sequence[str], default: Callable[[], str]) -> None:
    """Put the one model in `given["model"]`. With --model the first argument is one of those `after` it."""
    option = given.pop("model_option")
    if after and option is not None and given[after[-1]] is None:
        given |= dict(zip(("model", *after), (None, given["model"], *(given[name] for name in after))))
    given["model"] = chosen_model(given["model"], option) or default()


def _identifier(row: Row) -> str:
    return row.flag.removeprefix("--").replace("-", "_")


def _parameter(row: Row, defaults: Mapping[str, str]) -> inspect.Parameter:
    """Make the command's parameter; None stands for not given."""
    name, kind, option = _identifier(row), _typed(row), row.option
    declarations = [row.flag, *([option.short] if option.short else [])]
    if kind is bool and row.default is True:
        declarations = [f"{row.flag}/--no-{row.flag.removeprefix('--')}"]
    recommended = "the model's, else " if row.name in RECOMMENDED else ""
    words, _, default = option.help.partition(" Default: ")
    if name in defaults:
        default = f"{defaults[name]}."
    elif not isinstance(row.default, (bool, Mapping, tuple, NoneType)):
        default = f"{recommended}{row.default}."
    # A bound that only the width of an integer sets is no help.
    low, high = (None if bound is None or abs(bound) >= MAX_SHOWN else bound for bound in (option.low, option.high))
    limits = replace(option, low=low, high=high).range
    sentences = (words, f"{limits.capitalize()}." if limits else "", f"Default: {default}" if default else "")
    help = " ".join(filter(None, sentences))
    made = typer.Option(*declarations, help=help, rich_help_panel=row.panel, show_default=False, metavar=option.metavar)
    annotation = Annotated[kind | None, made]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _typed(row: Row) -> Any:
    """Return the type that is parsed from what was typed: lists for what may be given several times."""
    if row.type in (bool, int, float, str) or get_origin(row.type) is Literal:
        return row.type
    kinds = get_args(row.type)
    if get_origin(row.type) is UnionType and str in kinds and not any(get_origin(kind) is Sequence for kind in kinds):
        return str
    return list[int] if kinds == (int,) else list[str]


def _parse(row: Row, value: Any) -> object:
    """Convert a value of the command line to what its owner takes: NAME=VALUE pairs become a mapping."""
    if get_origin(row.type) is not Mapping:
        return tuple(value) if isinstance(value, list) else value
    key_type, value_type = get_args(row.type)
    metavar = row.option.metavar or "KEY=VALUE"
    pairs = [text.partition("=") for text in value]
    try:
        parsed = {key_type(key): value_type(item) for key, _, item in pairs if key and item}
    except ValueError:
        parsed = {}
    if len(parsed) < len(pairs):
        raise ConfigError(f"{row.flag} takes {metavar}, each {metavar.partition('=')[0]} once; got {' '.join(value)!r}")
    return parsed


def parse_pairs(owner: type, pairs: Sequence[str]) -> dict[str, object]:
    """Return options typed as NAME=VALUE, by keyword. Raises ConfigError for what is no such pair or no such number."""
    rows = {row.name: row for row in table(owner)}
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not text:
            raise ConfigError(f"an option is given as NAME=VALUE, got {pair!r}")
        kind = rows[name].type if name in rows else str
        try:
            number = kind(text) if kind in (int, float) else text
            found[name] = {"true": True, "false": False}.get(text, text) if kind is bool else number
        except ValueError:
            raise ConfigError(f"{name} must be a number, got {text!r}") from None
    return found


def only_adapter(config: EngineConfig) -> str | None:
    """Return the name of the one adapter, None without any. Raises ConfigError for several."""
    names = list(config.adapters)
    if len(names) > 1:
        raise ConfigError(f"this command runs one adapter, got {', '.join(names)}; `ridgeline serve` takes several")
    return names[0] if names else None
