"""Train one of the bundled models from the source of Python's standard library, or a head that drafts for a model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ridgeline.cli._measured import DeviceOption, EvalTextOption, TextOption, ThreadsOption
from ridgeline.cli._options import MODEL_HELP, with_options
from ridgeline.compress.recipe import HeadRecipe
from ridgeline.core.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.compress.train import Progress

HEADS = ("eagle3", "medusa")


@with_options()
def train(
    recipe: HeadRecipe,
    preset: Annotated[
        str,
        typer.Argument(
            help="python-9m, python-1m (its draft) or python-1m-diffusion; or a head for --for: eagle3, medusa."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the model or the head to.")],
    target: Annotated[str, typer.Option("--for", help=f"The model that a head drafts for. {MODEL_HELP}")] = "python-9m",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer.json of a bundled model. Default: a new one is trained."),
    ] = None,
    text: TextOption = None,
    eval_text: EvalTextOption = None,
    num_threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Train a bundled model, or a head that drafts for a model, into an ordinary Hugging Face folder."""
    from ridgeline.cli._measured import both_texts, training_on, use_threads

    console = Console()
    use_threads(num_threads)
    if preset in HEADS:
        from ridgeline.compress.calibrate import Loaded
        from ridgeline.compress.distill import token_stream
        from ridgeline.compress.heads import train_head
        from ridgeline.weights.save import publish

        if tokenizer is not None:
            raise ConfigError(f"{preset} drafts the tokens of {target}; leave --tokenizer out")
        report = reporter(console, f"of {recipe.draft_tokens} drafted tokens accepted")
        texts = both_texts(text, eval_text)
        with training_on(device):
            model = Loaded.open(target)
            training, held_out = (token_stream(each, model.folder) for each in texts)
            publish(train_head(preset, model, recipe, (training, held_out), out, report), out)
        console.print(f"{out} is ready: ridgeline serve {target} --speculate {preset.removesuffix('3')}:{out}")
        return
    from ridgeline.compress.bundle import train_bundled

    with training_on(device):
        facts = train_bundled(preset, out, reporter(console), tokenizer_folder=tokenizer, num_tokens=recipe.tokens)
    console.print(f"{out}: {facts.num_parameters:,} parameters, {facts.held_out_bits_per_byte:.3f} bits/byte held out")


def reporter(console: Console, unit: str = "bits/byte") -> "Callable[[Progress], None]":
    """Return what prints every tenth step of a training run, and every evaluation, in its unit."""

    def report(progress: "Progress") -> None:
        if progress.step % 10 and progress.held_out is None:
            return
        line = f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.3f}"
        line += f"  {progress.tokens_per_s:,.0f} tokens/s"
        if progress.held_out is not None:
            line += f"  held out {progress.held_out:.3f} {unit}"
        console.print(line, highlight=False)

    return report
