"""Measure a folder that a command made beside the model that it was made of, and keep what was found in it."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ridgeline.cli._tables import counting
from ridgeline.core.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.quality.evaluation import Evaluation
    from ridgeline.quality.texts import Texts

INPUT_TOKENS = 1 << 14  # of the held-out text on which inputs of 8 bits are measured

OutOption = Annotated[Path, typer.Option(help="Folder to write; it appears when it is complete.")]
TextOption = Annotated[
    list[Path] | None,
    typer.Option(help="A text that it is made with, UTF-8; give several. Default: Python, the standard library's."),
]
EvalTextOption = Annotated[
    list[Path] | None,
    typer.Option(help="A held-out text to measure the quality on; give several. Default: Python that ships here."),
]
EvalTokensOption = Annotated[
    int, typer.Option(min=0, help="Number of tokens to measure the quality on; 0 leaves it unmeasured.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--num-threads", "-t", min=1, help="Number of compute threads. Default: all cores.")
]

DeviceOption = Annotated[str, typer.Option(help="Where it is trained, as torch names it: cpu, cuda, cuda:1, mps.")]


@contextmanager
def training_on(device: str) -> Generator[None]:
    """Let torch keep new tensors on a device. Raises ConfigError where there is none such."""
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {device} is not one that torch computes on here: {str(error).splitlines()[0]}"
        ) from error
    with torch.device(device):
        yield


def use_threads(num_threads: int | None) -> None:
    """Let torch compute with so many threads, where any number was asked for."""
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)


def both_texts(text: list[Path] | None, eval_text: list[Path] | None) -> "tuple[Texts, Texts]":
    """Read the text that a model is made with, and the held-out one. Raises ConfigError for one that is both."""
    from ridgeline.compress.calibrate import default_texts
    from ridgeline.quality.texts import read_texts

    own, held_out = read_texts(text) if text else default_texts(), read_texts(eval_text or [])
    if shared := set(own.by_name.values()) & set(held_out.by_name.values()):
        name = next(name for name, each in held_out.by_name.items() if each in shared)
        raise ConfigError(f"{name} is calibration text and held-out text; a model is measured on what it has not seen")
    return own, held_out


def measured(
    folder: Path, base: str, texts: "Texts", max_tokens: int, num_threads: int | None, facts: Mapping[str, object]
) -> "Evaluation":
    """Measure a folder beside its base, show what was found, and write it into the folder, with how this was made.

    What inputs of 8 bits cost comes first: the folder is measured with those that it will be served with.
    """
    import msgspec

    from ridgeline.cli.evaluate import show
    from ridgeline.core.config import EngineConfig
    from ridgeline.quality.evaluation import base_config, evaluate, store_input_cost, write_quality

    config = EngineConfig.of(str(folder), num_threads=num_threads)
    with counting(Console(file=sys.stderr), "scoring inputs") as report, suppress(ConfigError):  # no integers
        store_input_cost(config, texts, max_tokens=min(max_tokens, INPUT_TOKENS), report=report)
    with counting(Console(file=sys.stderr), "scoring tokens") as report:
        found = evaluate(config, base_config(config, base, {}), texts, max_tokens=max_tokens, report=report)
    write_quality(folder, {"method": facts, **msgspec.to_builtins(found)})
    show(Console(), found)
    return found
