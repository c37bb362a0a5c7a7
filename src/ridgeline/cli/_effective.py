"""The options that a command has been given, by default too, as a file that it takes."""

import json
from collections.abc import Mapping
from typing import cast

import typer

from ridgeline.core.config import EngineConfig
from ridgeline.core.options import table
from ridgeline.server.settings import ServerSettings


def effective_options(context: typer.Context, config: EngineConfig) -> str:
    """Return all options as TOML that --config takes, each with where it was set; what is not set, or secret, is told
    in comments."""
    rows = {row.flag.removeprefix("--"): row for owner in (ServerSettings, EngineConfig) for row in table(owner)}
    words = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
    lines: list[str] = []
    for name, given in context.params.items():
        flag = name.replace("_", "-")
        if flag in ("config-file", "print-config", "model-option"):
            continue
        source, value = context.get_parameter_source(name), given
        if name == "model":
            value = config.model.model
        elif given is None and flag in rows:
            value = rows[flag].default
        if isinstance(value, Mapping):
            value = [f"{key}={item}" for key, item in cast("Mapping[str, object]", value).items()]
        where = words.get("" if source is None or given is None else source.name, "default")
        secret = flag == "api-key" and value is not None
        is_told = value is None or secret
        text = "..." if secret else json.dumps(value, ensure_ascii=False)
        lines.append(f"{'# ' if is_told else ''}{flag} = {text}  # {where}")
    return "\n".join(lines)
