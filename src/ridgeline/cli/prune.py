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
    """Prune a model into a smaller one: ridgeline prune MODEL --params 4.5M --out DIR

    Layers, hidden channels, heads and neurons that matter least to a text are left out. What stays is an ordinary
    folder, which has forgotten much until it is trained: ridgeline distill DIR --teacher MODEL.
    """
    import torch

    from ridgeline.cli._measured import both_texts, measured
    from ridgeline.cli._tables import counting
    from ridgeline.compress.prune import facts
    from ridgeline.compress.prune import prune as pruned
    from ridgeline.weights.folder import ModelFolder
    from ridgeline.weights.save import publish

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    texts, held_out = both_texts(text, eval_text)
    folder = ModelFolder.open(model)
    with counting(Console(stderr=True), "comparing shapes") as report:
        partial, found = pruned(folder, recipe, texts, out, report)
    if eval_tokens:
        measured(partial, model, held_out, eval_tokens, num_threads, facts(folder, recipe, texts, found))
    publish(partial, out)
    shape = found[0].shape
    heads = f"{shape.kv_heads * shape.group} heads on {shape.kv_heads} of keys and values"
    typer.echo(
        f"{out}: {shape.layers} layers of {shape.hidden} channels, {heads}, MLPs of {shape.ffn}; now train it: "
        f"ridgeline distill {out} --teacher {model}"
    )
