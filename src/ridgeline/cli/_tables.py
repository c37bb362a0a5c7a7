"""Show tables on standard output, 100 columns of plain text where there is no terminal, and bars of progress."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PIPED_COLUMNS = 100


def plain_console() -> Console:
    """Return a console that prints text as it is: model files and paths are no markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    return console


def new_table(console: Console, columns: Sequence[str], *, title: str | None = None, left: int = 1) -> Table:
    """Make an empty table without lines where there is no terminal.

    The first `left` columns hold text, the others numbers.
    """
    box = SIMPLE_HEAD if console.is_terminal else None
    table = Table(title=title, title_justify="left", title_style="bold", box=box, pad_edge=False)
    for index, name in enumerate(columns):
        if index < left:
            table.add_column(name, overflow="fold", min_width=len(name))
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


@contextmanager
def counting(console: Console, title: str) -> Generator[Callable[..., None]]:
    """Show a bar that says when it will end; the value takes what is done, of how many, and a text to show."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[text]}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, text="")

        def report(done: int, total: int, text: str = "") -> None:
            bar.update(task, completed=done, total=total, text=text)

        yield report
