"""Estimate what inference costs, and why: `explore` one idea, `price` a step, `simulate` a run, `lecture` the numbers
of texts.

Results are typed, show themselves in a notebook, and become frames with `to_pandas()`. Must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ridgeline.explain import explorers

if TYPE_CHECKING:
    from pathlib import Path

    from ridgeline.explain.diagnosis import Diagnosis
    from ridgeline.explain.exploration import Exploration
    from ridgeline.explain.lectures import Lecture
    from ridgeline.explain.planner import plan
    from ridgeline.explain.pricing import price
    from ridgeline.explain.simulation import simulate

__all__ = ["doctor", "explore", "lecture", "plan", "price", "simulate"]

_LATE = {"plan": "planner", "price": "pricing", "simulate": "simulation"}


def explore(name: str, **inputs: Any) -> "Exploration":
    """Return what an explorer says for `inputs`, and its defaults for others: `explore("kv", layers=32)`.

    Raises ConfigError for an explorer or an input that is not there, and for a value out of range.
    """
    return explorers.explore(name, **inputs)


def doctor(journal: "Path | str") -> "Diagnosis":
    """Return what makes the engine slow that wrote a file of `--journal`. Raises ConfigError for one that is broken."""
    from pathlib import Path

    from ridgeline.engine.recording import read_recording
    from ridgeline.explain.diagnosis import diagnose

    return diagnose(read_recording(Path(journal)))


def lecture() -> "Lecture":
    """Return the numbers that texts on inference name, each recomputed from its inputs."""
    from ridgeline.explain.lectures import Lecture, rows

    return Lecture(rows())


def __getattr__(name: str) -> object:
    """Return a function once it is asked for: help does not wait for what they import."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
