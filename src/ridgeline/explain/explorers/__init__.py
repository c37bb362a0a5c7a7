"""Explorers: one idea of inference each, as figures that follow from a few inputs. One file each.

A file has `explore`, whose parameters are in inputs.toml, with range and meaning. The command line (`ridgeline explain
NAME`) and the Python API are made of them.
"""

import ast
import inspect
import pkgutil
import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module, resources
from typing import Annotated, Any

import msgspec

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import Exploration, Found, Grid, Series


def names() -> list[str]:
    """Return the names of all explorers: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def summary(name: str) -> str:
    """Return the first line of an explorer's docstring, read without importing it. Raises ConfigError."""
    _require(name)
    source = (resources.files(__name__) / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def inputs_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the inputs of an explorer: each a type with a msgspec.Meta, and a default. Raises ConfigError."""
    known = tomllib.loads((resources.files(__name__) / "inputs.toml").read_text(encoding="utf-8"))
    said, inputs = known["every"] | known.get(name, {}), inspect.signature(_explorer(name)).parameters
    types = {key: Annotated[each.annotation, msgspec.Meta(**said[key])] for key, each in inputs.items()}
    return {key: each.replace(annotation=types[key]) for key, each in inputs.items()}


def explore(name: str, **inputs: Any) -> Exploration:
    """Return what an explorer says for `inputs`, and its defaults for others: `explore("kv", layers=32)`.

    Raises ConfigError for an explorer or an input that is not there, and for a value out of range.
    """
    from ridgeline.cost.datasheets import datasheet

    fields = [(field, parameter.annotation, parameter.default) for field, parameter in inputs_of(name).items()]
    try:
        given = msgspec.convert(inputs, type=msgspec.defstruct(name, fields, forbid_unknown_fields=True))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {str(error).replace('`', '')}; see ridgeline explain {name} --help") from error
    inputs = msgspec.structs.asdict(given)
    sentence, figures, drawn = _explorer(name)(**inputs)
    card = inputs.get("card")
    if isinstance(card, str) and datasheet(card).peak("bf16", 1) is None:
        sentence += f" The datasheet of {card} names no peak of arithmetic: only memory is counted."
    series, grids = [each for each in drawn if isinstance(each, Series)], [e for e in drawn if isinstance(e, Grid)]
    return Exploration(name, inputs, sentence, figures, series, grids)


def figures(name: str, **inputs: Any) -> Mapping[str, float]:
    """Return the figures of an explorer that are known, for inputs within their ranges."""
    return {figure.name: figure.value for figure in _explorer(name)(**inputs)[1] if figure.value is not None}


def _require(name: str) -> None:
    if name not in names():
        raise ConfigError(f"there is no explorer {name[:40]!r}; there are {', '.join(names())}")


def _explorer(name: str) -> Callable[..., Found]:
    _require(name)
    return import_module(f"{__name__}.{name}").explore
