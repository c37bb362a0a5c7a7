"""How a model is computed: the options that every command with a model in this process has.

A command takes them as one parameter, `compute: Compute`, under the decorator `computes`, as any other dataclass whose
fields are options.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from ridgeline.core.config import (
    BackendConfig,
    BackendName,
    InputBits,
    KvDtype,
    QuantizationScheme,
    QuantizeConfig,
)
from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One field per option, named as the option is."""

    quantize: Annotated[
        QuantizationScheme | None, typer.Option(help="Round the weights to integers while they are loaded.")
    ] = None
    quantize_group_size: Annotated[int, typer.Option(help="Of int4: weights that share a scale; 32, 64 or 128.")] = 128
    quantize_zero_points: Annotated[
        bool, typer.Option("--quantize-zero-points", help="Of int4: a zero point beside each scale.")
    ] = False
    quantize_inputs: Annotated[
        InputBits,
        typer.Option(help="Of quantized layers: what their inputs are rounded to; int8 is faster, less exact."),
    ] = "int16"
    no_quantize_embeddings: Annotated[
        bool, typer.Option("--no-quantize-embeddings", help="Leave token table and head as they are.")
    ] = False
    kv_dtype: Annotated[KvDtype, typer.Option(help="Of keys and values in the cache; auto: as the model.")] = "auto"
    backend: Annotated[BackendName, typer.Option(help="What computes; auto: native where it runs, else reference.")] = (
        "auto"
    )
    isa: Annotated[
        str | None, typer.Option(help="Instructions of the native backend, such as avx2. Default: the widest.")
    ] = None
    lora: Annotated[
        list[str] | None, typer.Option(help="A LoRA adapter in PEFT's format: name=folder. May be given several times.")
    ] = None
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same answer whatever else is running; slower.")
    ] = False

    no_pack_cache: Annotated[
        bool, typer.Option("--no-pack-cache", help="Keep no packed weights on disk for the next start.")
    ] = False

    def quantize_config(self) -> QuantizeConfig:
        """Raises ConfigError for options that do not go together."""
        return QuantizeConfig(
            scheme=self.quantize,
            group_size=self.quantize_group_size,
            zero_points=self.quantize_zero_points,
            inputs=self.quantize_inputs,
            embeddings=not self.no_quantize_embeddings,
        )

    def adapters(self) -> dict[str, str]:
        """Folders by name. Raises ConfigError for an option that is not name=folder, or a name given twice."""
        pairs = [option.partition("=") for option in self.lora or ()]
        named = {name: folder for name, _, folder in pairs}
        if len(named) < len(pairs) or not all(name and folder for name, folder in named.items()):
            raise ConfigError(f"--lora takes name=folder, each name once; got {' '.join(self.lora or ())!r}")
        return named

    def only_adapter(self) -> str | None:
        """The name of the one adapter, None without any. Raises ConfigError for several."""
        names = list(self.adapters())
        if len(names) > 1:
            raise ConfigError(f"this command runs one adapter, got {', '.join(names)}; `ridgeline serve` takes several")
        return names[0] if names else None

    def backend_config(self) -> BackendConfig:
        return BackendConfig(
            backend=self.backend, isa=self.isa, deterministic=self.deterministic, pack_cache=not self.no_pack_cache
        )


def computes(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its dataclasses as keyword parameters in their place, behind its own."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in signature.parameters if is_dataclass(hints[name])}
    own = [p.replace(annotation=hints[name]) for name, p in signature.parameters.items() if name not in groups]
    added = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
        for group in groups.values()
        for field, hint in zip(fields(group), get_type_hints(group, include_extras=True).values(), strict=True)
    ]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    with_options.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options
