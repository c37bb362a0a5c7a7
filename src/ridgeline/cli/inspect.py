"""Print what a model is and what it costs: spec, program, FLOPs, bytes and KV memory, from its config alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ridgeline.cli._options import HardwareOption, ModelOption, chosen_model
from ridgeline.core.config import Dtype
from ridgeline.core.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.weights.folder import ModelFolder


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A model folder or .gguf file, a config.json or a bundled model's name."),
    ] = None,
    model_option: ModelOption = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 30, help="Context of the decode step in tokens. Default: what the model declares."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=1 << 16, help="Number of sequences in the decode step.")] = 1,
    prompt: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 30, help="Tokens of the prefill step. Default: 1024, or a shorter context."),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option("--dtype", help="Data type of weights and activations; auto takes the config's, else float32."),
    ] = "auto",
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "int4"],
        typer.Option("--kv-dtype", help="Data type of the KV cache; auto takes that of --dtype."),
    ] = "auto",
    speculate: Annotated[
        str, typer.Option(metavar="METHOD", help="Print instead from which acceptance drafts pay, as of draft:MODEL.")
    ] = "",
    hardware: HardwareOption = "this",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every op of every layer.")] = False,
) -> None:
    """Print what a model is and what it costs. Needs no weights.

    FLOPs and bytes are those of the op table: a multiply-add is two FLOPs, and every operand crosses memory once.
    """
    from ridgeline.cli._inspection import as_json, examine
    from ridgeline.weights.fetch import fetched

    target = chosen_model(model, model_option)
    if target is None:
        raise ConfigError("no model was given: ridgeline inspect MODEL")
    target = str(fetched(target) or target)
    if speculate:
        from ridgeline.cli._inspect_drafts import print_break_even

        print_break_even(target, hardware, context, json=json, speculate=speculate, dtype=dtype, kv_dtype=kv_dtype)
        return
    folder = _folder_with_weights(target)
    config = _read_config(target) if folder is None else folder.config
    inspection = examine(config, context=context, batch=batch, prompt=prompt, dtype=dtype, kv_dtype=kv_dtype)
    if (path := Path(target).expanduser()).exists():
        from ridgeline.cli._inspect_stored import with_stored

        inspection = with_stored(inspection, path, folder)
    if json:
        typer.echo(as_json(inspection))
    else:
        from ridgeline.cli._inspect_text import print_inspection

        print_inspection(inspection)


def _folder_with_weights(target: str) -> "ModelFolder | None":
    """Return a .gguf file, or a folder of quantized weights. Raises ModelLoadError for a broken one."""
    path = Path(target).expanduser() if "~" in target else Path(target)
    if not target.endswith(".gguf") and ("\0" in target or len(target) > 4000 or not any(path.glob("*.safetensors"))):
        return None
    from ridgeline.weights.folder import ModelFolder

    folder = ModelFolder.open(path)
    return folder if folder.gguf is not None or folder.config.get("quantization_config") is not None else None


def _read_config(target: str) -> Mapping[str, object]:
    """Read the config. Raises ConfigError where `target` holds none, ModelLoadError where the config is broken."""
    from ridgeline.weights.folder import BUNDLED_MODELS
    from ridgeline.weights.jsonfile import read_json_object

    bundled = {config.parent.name: config for config in BUNDLED_MODELS.glob("*/config.json")}
    try:
        path = Path(target).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, no such user
        raise ConfigError(f"{target[:200]!r} is not a path: {str(error)[:200]}") from error
    if is_folder:
        return read_json_object(path / "config.json")
    if exists:
        return read_json_object(path)
    if target in bundled:
        return read_json_object(bundled[target])
    known = f"no folder, no config.json and no bundled model ({', '.join(sorted(bundled)) or 'none'})"
    raise ConfigError(f"{target[:200]!r} is {known}; of a model on the hub, download the config.json and give its path")
