"""Quantize a model into a folder that Ridgeline, vLLM and transformers load, and measure what that cost."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ridgeline.cli._measured import EvalTextOption, EvalTokensOption, OutOption, TextOption, ThreadsOption
from ridgeline.cli._options import MODEL_HELP, with_options
from ridgeline.cli._tables import counting
from ridgeline.compress.recipe import GROUPED, Recipe
from ridgeline.core.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.compress.quantize import Progress, QuantizeJob
    from ridgeline.quality.comparison import Estimate


@with_options()
def quantize(
    recipe: Recipe,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    out: OutOption,
    text: TextOption = None,
    eval_text: EvalTextOption = None,
    eval_tokens: EvalTokensOption = 1 << 16,
    max_kl: Annotated[
        float | None,
        typer.Option(min=0, help="Refuse a result whose KL, in bits per token, may be larger; only its report stays."),
    ] = None,
    file_format: Annotated[
        Literal["folder", "gguf"],
        typer.Option("--format", help="folder, or gguf: --out is one file, which llama.cpp runs too (groups of 32)."),
    ] = "folder",
    num_threads: ThreadsOption = None,
) -> None:
    """Quantize a model into a folder: ridgeline quantize MODEL --method gptq --out DIR

    Linear layers become integers of 4 or 8 bits, layer by layer, in the format of compressed-tensors; embeddings and
    head stay as they are. A run that was stopped goes on where it was when it is started again. What it cost in quality
    is measured on a held-out text and written beside the weights.
    """
    from ridgeline.cli._measured import both_texts, measured, use_threads
    from ridgeline.compress.quantize import QuantizeJob
    from ridgeline.weights.folder import ModelFolder

    use_threads(num_threads)
    if max_kl is not None and not eval_tokens:
        raise ConfigError("--max-kl needs a measurement, and --eval-tokens 0 leaves it out; drop one of them")
    calibration, held_out = both_texts(text, eval_text)
    folder, console = ModelFolder.open(model), Console(stderr=True)
    if eval_tokens:
        folder.text_tokenizer()  # that there is one
    writer = None
    if file_format == "gguf":
        from ridgeline.weights.gguf.write import GgufWriter, check_form

        if recipe.group_size is None and recipe.method in GROUPED:
            recipe = replace(recipe, group_size=32)  # those that GGUF has
        check_form(recipe.form())
        writer = GgufWriter(folder)
    job = QuantizeJob(folder, recipe, calibration, out)
    for name, why in job.left_out.items():
        console.print(f"{name} stays as it is: {why}", highlight=False)
    _run(console, job)
    if eval_tokens:
        found = measured(job.partial, model, held_out, eval_tokens, num_threads, job.facts())
        _check(job, found.comparison.kl, max_kl)
    job.publish(writer)
    typer.echo(f"{out} is ready: ridgeline serve {out}")


def _check(job: "QuantizeJob", kl: "Estimate", max_kl: float | None) -> None:
    """End where the KL is worse than `max_kl`."""
    import math

    if max_kl is not None and not (kl.mean if math.isnan(kl.upper) else kl.upper) <= max_kl:
        job.discard()
        typer.echo(
            f"ridgeline: refused: the KL is {kl.mean:.4f} ± {kl.standard_error:.4f} bits per token and --max-kl is "
            f"{max_kl:g}; {job.out} has the report alone. Take smaller groups, 8 bits or a larger --max-kl",
            err=True,
        )
        raise typer.Exit(1)


def _run(console: Console, job: "QuantizeJob") -> None:
    """Quantize with a bar of layers."""
    with counting(console, "quantizing layers") as count:

        def report(progress: "Progress") -> None:
            ratios = [each.error_ratio for each in progress.reports if each.error_ratio is not None]
            error = f"error {sum(ratios) / len(ratios):.2f} x rounding's" if ratios else ""
            count(progress.layer, progress.num_layers, error)

        job.run(report)
    unseen = [each.name for each in job.reports if each.error_ratio is None]
    if unseen and job.calibrates:
        shown = ", ".join(unseen[:5]) + (", ..." if len(unseen) > 5 else "")
        console.print(
            f"no calibration token reached {len(unseen)} matrices, rounded to nearest: {shown}", highlight=False
        )
