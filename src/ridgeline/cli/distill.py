"""Train a student to predict what its teacher does, and measure how near it comes."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from ridgeline.cli._measured import DeviceOption, EvalTextOption, EvalTokensOption, OutOption, TextOption, ThreadsOption
from ridgeline.cli._options import MODEL_HELP, with_options
from ridgeline.compress.recipe import DistillRecipe


@with_options()
def distill(
    recipe: DistillRecipe,
    student: Annotated[str, typer.Argument(metavar="STUDENT", help=MODEL_HELP)],
    teacher: Annotated[str, typer.Option(help="The model that it learns from, with the same vocabulary.")],
    out: OutOption,
    text: TextOption = None,
    eval_text: EvalTextOption = None,
    eval_tokens: EvalTokensOption = 1 << 16,
    num_threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Train a student on its teacher's predictions: ridgeline distill STUDENT --teacher MODEL --out DIR

    It begins with the weights that it has, such as those of ridgeline prune, and becomes an ordinary folder. Until then
    DIR.partial has its weights as of the last evaluation.
    """
    from ridgeline.cli._measured import both_texts, measured, training_on, use_threads
    from ridgeline.cli.train import reporter
    from ridgeline.compress.calibrate import Loaded
    from ridgeline.compress.distill import distill as distilled
    from ridgeline.compress.distill import write_card
    from ridgeline.weights.save import publish

    use_threads(num_threads)
    texts, report = both_texts(text, eval_text), reporter(Console(stderr=True))
    with training_on(device):
        partial = distilled(Loaded.open(student), Loaded.open(teacher), recipe, texts, out, report)
    if eval_tokens:
        facts = {"method": "distill", "source": student, "teacher": teacher, **asdict(recipe), "text": texts[0].source}
        found = measured(partial, teacher, texts[1], eval_tokens, num_threads, facts)
        write_card(partial, found, facts)
    publish(partial, out)
    typer.echo(f"{out} is ready: ridgeline serve {out}")
