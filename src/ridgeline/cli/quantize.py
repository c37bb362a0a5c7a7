"""Quantize a model into a folder that Ridgeline, vLLM and transformers load, and measure what that cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ridgeline.cli._options import MODEL_HELP, with_options
from ridgeline.cli._tables import counting
from ridgeline.compress.recipe import Recipe
from ridgeline.core.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.compress.quantize import Progress, QuantizeJob
    from ridgeline.quality.texts import Texts


@with_options()
def quantize(
    recipe: Recipe,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    out: Annotated[Path, typer.Option(help="Folder to write; it appears when it is complete.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A calibration text, UTF-8; give several. Default: Python, the standard library's."),
    ] = None,
    eval_text: Annotated[
        list[Path] | None,
        typer.Option(help="A held-out text to measure the quality on; give several. Default: Python that ships here."),
    ] = None,
    eval_tokens: Annotated[
        int, typer.Option(min=0, help="Number of tokens to measure the quality on; 0 leaves it unmeasured.")
    ] = 1 << 16,
    max_kl: Annotated[
        float | None,
        typer.Option(min=0, help="Refuse a result whose KL, in bits per token, may be larger; only its report stays."),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option("--num-threads", "-t", min=1, help="Number of compute threads. Default: all cores.")
    ] = None,
) -> None:
    """Quantize a model into a folder: ridgeline quantize MODEL --method gptq --out DIR

    Linear layers become integers of 4 or 8 bits, layer by layer, in the format of compressed-tensors; embeddings and
    head stay as they are. A run that was stopped goes on where it was when it is started again. What it cost in quality
    is measured on a held-out text and written beside the weights.
    """
    import torch

    from ridgeline.compress.calibrate import default_texts
    from ridgeline.compress.quantize import QuantizeJob
    from ridgeline.quality.texts import read_texts
    from ridgeline.weights.folder import ModelFolder

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if max_kl is not None and not eval_tokens:
        raise ConfigError("--max-kl needs a measurement, and --eval-tokens 0 leaves it out; drop one of them")
    calibration, held_out = read_texts(text) if text else default_texts(), read_texts(eval_text or [])
    if shared := set(calibration.by_name.values()) & set(held_out.by_name.values()):
        name = next(name for name, each in held_out.by_name.items() if each in shared)
        raise ConfigError(f"{name} is calibration text and held-out text; a model is measured on what it has not seen")
    console = Console(stderr=True)
    job = QuantizeJob(ModelFolder.open(model), recipe, calibration, out)
    for name, why in job.left_out.items():
        console.print(f"{name} stays as it is: {why}", highlight=False)
    _run(console, job)
    if eval_tokens:
        _measure(console, job, model, held_out, eval_tokens, max_kl, num_threads)
    job.publish()
    typer.echo(f"{out} is ready: ridgeline serve {out}")


def _measure(
    console: Console,
    job: "QuantizeJob",
    model: str,
    texts: "Texts",
    max_tokens: int,
    max_kl: float | None,
    num_threads: int | None,
) -> None:
    """Measure the folder beside its source and write what was found; end where that is worse than `max_kl`."""
    import math

    from ridgeline.cli.evaluate import show
    from ridgeline.core.config import EngineConfig
    from ridgeline.quality.evaluation import base_config, evaluate, write_quality

    config = EngineConfig.of(str(job.partial), num_threads=num_threads)
    base = base_config(config, model, {})
    with counting(console, "scoring tokens") as report:
        found = evaluate(config, base, texts, max_tokens=max_tokens, report=report)
    write_quality(job.partial, found, job.facts())
    show(Console(), found)
    kl = found.comparison.kl
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
