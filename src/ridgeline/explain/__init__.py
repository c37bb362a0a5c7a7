"""Estimate what inference costs, and why: `explore` one idea, `price` a step, or over several `devices`, `simulate` a
run, `plan` a server, find the `break_even` of drafts, `lecture` the numbers of texts; of an engine's journal `doctor`,
`replay` and a sequence's `life`.

Results are typed, show themselves in a notebook, and become frames with `to_pandas()`. Must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.explain.diagnosis import doctor
    from ridgeline.explain.explorers import explore
    from ridgeline.explain.lectures import lecture
    from ridgeline.explain.lives import life
    from ridgeline.explain.planner import plan
    from ridgeline.explain.pricing import price
    from ridgeline.explain.replaying import replay
    from ridgeline.explain.rounds import break_even
    from ridgeline.explain.simulation import simulate
    from ridgeline.explain.spreading import devices

__all__ = ["break_even", "devices", "doctor", "explore", "lecture", "life", "plan", "price", "replay", "simulate"]

_MODULES = {
    "break_even": "rounds", "devices": "spreading", "doctor": "diagnosis", "explore": "explorers",
    "lecture": "lectures", "life": "lives", "plan": "planner", "price": "pricing",
    "replay": "replaying", "simulate": "simulation",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Return a function once it is asked for: help does not wait for what they import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
