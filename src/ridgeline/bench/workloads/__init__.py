"""The kinds of workload, one file each: its class `WORKLOAD` is a frozen dataclass whose fields are the options."""

import dataclasses
import hashlib
import importlib
import pkgutil
from pathlib import Path
from typing import TypeAlias, cast

import msgspec

from ridgeline.bench.workload import Workload
from ridgeline.core.errors import ConfigError

OptionValue: TypeAlias = str | int | float | bool | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """A workload as a report names it. `path` is cut to the file's name; its content is pinned by `sha256`."""

    kind: str
    options: dict[str, OptionValue]
    sha256: str | None


def workload_kinds() -> list[str]:
    """List the names accepted by `parse_workload`."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def parse_workload(text: str) -> Workload:
    """Build a workload from `kind` or `kind:option=value,...`, such as `fixed:input_tokens=512,output_tokens=64`.

    Raises ConfigError for an unknown kind or option, or a value of the wrong type.
    """
    kind, _, rest = text.partition(":")
    if kind not in workload_kinds():
        raise ConfigError(f"unknown workload {kind!r}; choose one of {', '.join(workload_kinds())}")
    cls: type[Workload] = importlib.import_module(f"{__name__}.{kind}").WORKLOAD
    known = _options_of(cls)
    options: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        name, equals, value = item.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"workload {kind}: cannot read {item!r}; options are {', '.join(known)}, as name=value")
        options[name] = value
    try:
        return msgspec.convert(options, type=cls, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"workload {kind}: {error}") from None


def describe_workload(workload: Workload) -> WorkloadFacts:
    """Return the kind and options of a workload, with the hash of the file it reads, if any."""
    options = {name: cast("OptionValue", getattr(workload, name)) for name in _options_of(type(workload))}
    sha256 = None
    if "path" in options:
        path = Path(str(options["path"]))
        options["path"] = path.name
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return WorkloadFacts(kind=type(workload).__module__.rpartition(".")[2], options=options, sha256=sha256)


def _options_of(cls: type[Workload]) -> list[str]:
    assert dataclasses.is_dataclass(cls), "a workload is a dataclass"
    return [field.name for field in dataclasses.fields(cls)]
