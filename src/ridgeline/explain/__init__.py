"""Estimate what inference costs at least, and why: `explore` one idea, `price` a step, `lecture` the numbers of texts.

Results are typed, show themselves in a notebook, and become frames with `to_pandas()`. Must not import torch.
"""

from typing import TYPE_CHECKING, Any

from ridgeline.explain import explorers

if TYPE_CHECKING:
    from ridgeline.explain.exploration import Exploration
    from ridgeline.explain.lectures import Lecture
    from ridgeline.explain.pricing import price

__all__ = ["explore", "lecture", "price"]


def explore(name: str, **inputs: Any) -> "Exploration":
    """Return what an explorer says for `inputs`, and its defaults for others: `explore("kv", layers=32)`.

    Raises ConfigError for an explorer or an input that is not there, and for a value out of range.
    """
    return explorers.explore(name, **inputs)


def lecture() -> "Lecture":
    """Return the numbers that texts on inference name, each recomputed from its inputs."""
    from ridgeline.explain.lectures import Lecture, rows

    return Lecture(rows())


def __getattr__(name: str) -> object:
    """Return `price` once it is asked for: it needs numpy, which the help of a command does not wait for."""
    if name == "price":
        from ridgeline.explain.pricing import price

        return price
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
