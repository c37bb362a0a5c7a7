"""Python's garbage collector, kept away from what a start makes: hundreds of thousands of objects, none of them garbage.

Used around heavy imports and while an engine is built. Must not import anything of ridgeline.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Nothing is collected within. As a decorator, for as long as each call of the function."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def long_lived_imports() -> Generator[None]:
    """For imports within: the collector is paused, and never looks at what there is by their end.

    torch alone is a quarter of a million objects. Going through them takes a third of its import, and afterwards a
    tenth of a second each time, in the midst of a step.
    """
    with collector_paused():
        yield
    gc.freeze()
