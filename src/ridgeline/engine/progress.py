"""The bar that `LLM.generate` shows while it works: completions done and tokens per second."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from ridgeline.core.clock import Clock

SHOW_S = 0.1  # between two looks of the bar: it costs more than the rest of a small model's loop


@contextmanager
def progress_bar(total: int, clock: Clock, *, show: bool) -> Generator[Callable[[int, int], None]]:
    """Give a function to call after every step with the completions done and the tokens generated so far."""
    if not show:
        yield lambda num_done, num_tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    what, rate = TextColumn("{task.description}"), TextColumn("{task.fields[rate]}")
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), rate)
    started_s = shown_s = clock()
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("generating", total=total, rate="")

        def update(num_done: int, num_tokens: int) -> None:
            nonlocal shown_s
            now_s = clock()
            if now_s - shown_s > SHOW_S or num_done == total:
                bar.update(task, completed=num_done, rate=f"{num_tokens / (now_s - started_s):.1f} tokens/s")
                shown_s = now_s

        yield update
