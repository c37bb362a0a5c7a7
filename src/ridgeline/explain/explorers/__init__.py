"""Explorers: one idea of inference each, as figures that follow from a few inputs. One file each.

A file has `Inputs`, a msgspec Struct whose fields say their range and meaning, and `explore`. The command line
(`ridgeline explain NAME`) and the Python API are made of them.
"""

import ast
import pkgutil
from dataclasses import replace
from importlib import import_module, resources
from typing import Any

import msgspec

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import Exploration


def names() -> list[str]:
    """Return the names of all explorers: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def summary(name: str) -> str:
    """Return the first line of an explorer's docstring, read without importing it."""
    source = (resources.files(__name__) / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def inputs_of(name: str) -> type[msgspec.Struct]:
    """Return the inputs of an explorer. Raises ConfigError where there is none of that name."""
    return _module(name).Inputs


def explore(name: str, **inputs: Any) -> Exploration:
    """Return what an explorer says for `inputs`, and its defaults for others.

    Raises ConfigError for an explorer or an input that is not there, and for a value out of range.
    """
    from ridgeline.cost.datasheets import datasheet

    module = _module(name)
    try:
        given = msgspec.convert(inputs, type=module.Inputs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {str(error).replace('`', '')}; see ridgeline explain {name} --help") from error
    found: Exploration = module.explore(given)
    card = found.inputs.get("card")
    if isinstance(card, str) and datasheet(card).peak("bf16", 1) is None:
        told = f"{found.sentence} The datasheet of {card} names no peak of arithmetic: only memory is counted."
        found = replace(found, sentence=told)
    return found


def _module(name: str) -> Any:
    if name not in names():
        raise ConfigError(f"there is no explorer {name[:40]!r}; there are {', '.join(names())}")
    return import_module(f"{__name__}.{name}")
