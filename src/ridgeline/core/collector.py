"""Stop Python's garbage collector from looking through what a start makes: a quarter of a million objects that stay."""

import atexit
import gc
from collections.abc import Generator
from contextlib import contextmanager

# New objects at a look, looks at these before one at those left over, and those before a full one.
SELDOM = (5000, 5, 100)


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause the garbage collector within; as a decorator, for as long as each call of the function."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def long_lived_imports() -> Generator[None]:
    """Pause the collector for the imports within, and exempt what exists by then until the process ends.

    Going through what torch makes takes a third of its import, and a tenth of a second each time in midst of a step.
    """
    with collector_paused():
        yield
    gc.freeze()
    atexit.register(gc.unfreeze)  # the interpreter frees modules through the collector, and extensions check it


def collect_rarely() -> None:
    """Let the collector look less often in a process that serves, whose requests leave nothing for it.

    What it finds is alive: 500 streams are a hundred thousand objects, and all else waits for 80 ms meanwhile.
    """
    gc.freeze()
    gc.set_threshold(*SELDOM)
