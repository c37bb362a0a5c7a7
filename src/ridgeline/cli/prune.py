"""Prune a model to a number of parameters or a latency, and measure what that cost."""

from typing import Annotated

import typer
from rich.console import Console

from ridgeline.cli._measured import EvalTextOption, EvalTokensOption, OutOption, TextOption, ThreadsOption
from ridgeline.cli._options import MODEL_HELP, with_options
from ridgeline.compress.recipe import PruneRecipe


@with_options()
def prune(
    recipe: PruneRecipe,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    out: OutOption,
    text: TextOption = None,
    eval_text: EvalTextOption = None,
    eval_tokens: EvalTokensOption = 1 << 16,
    num_threads: ThreadsOption = None,
) -> None:
    """Make a model smaller: ridgeline prune MODEL --params 4500000 --out DIR

    Layers, hidden channels, heads, neurons and experts that matter least to a text are left out. What stays is an
    ordinary folder, which has forgotten much until it is trained: ridgeline distill DIR --teacher MODEL.
    """
    from ridgeline.cli._measured import both_texts, measured, use_threads
    from ridgeline.cli._tables import counting
    from ridgeline.compress.calibrate import Loaded
    from ridgeline.compress.prune import prune as pruned
    from ridgeline.weights.save import publish

    use_threads(num_threads)
    texts, held_out = both_texts(text, eval_text)
    with counting(Console(stderr=True), "comparing shapes") as report:
        partial, shape, facts = pruned(Loaded.open(model), recipe, texts, out, report)
    if eval_tokens:
        measured(partial, model, held_out, eval_tokens, num_threads, facts)
    publish(partial, out)
    typer.echo(f"{out}: {shape}; now train it: ridgeline distill {out} --teacher {model}")
