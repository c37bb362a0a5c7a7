"""Train one of the bundled models from the source of Python's standard library."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ridgeline.compress.train import Progress


def train(
    preset: Annotated[
        str, typer.Argument(help="Name of the model: python-9m, python-1m (its draft), or python-1m-diffusion.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    tokens: Annotated[
        int | None, typer.Option(help="Number of tokens to train on. Default: the preset's.", min=1)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer.json to use. Default: a new one is trained.")
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option("--num-threads", "-t", help="Number of compute threads. Default: all cores.", min=1)
    ] = None,
) -> None:
    """Train a bundled model through the reference backend into an ordinary Hugging Face folder."""
    import torch

    from ridgeline.compress.bundle import train_bundled

    console = Console()
    if num_threads is not None:
        torch.set_num_threads(num_threads)

    facts = train_bundled(preset, out, reporter(console), tokenizer_folder=tokenizer, num_tokens=tokens)
    console.print(f"{out}: {facts.num_parameters:,} parameters, {facts.held_out_bits_per_byte:.3f} bits/byte held out")


def reporter(console: Console) -> "Callable[[Progress], None]":
    """Return what prints every tenth step of a training run, and every evaluation."""

    def report(progress: "Progress") -> None:
        if progress.step % 10 and progress.held_out_bits is None:
            return
        line = f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.3f}"
        line += f"  {progress.tokens_per_s:,.0f} tokens/s"
        if progress.held_out_bits is not None:
            line += f"  held out {progress.held_out_bits:.3f} bits/byte"
        console.print(line, highlight=False)

    return report
