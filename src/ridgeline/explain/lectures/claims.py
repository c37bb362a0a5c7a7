"""Claims of whole techniques, beside what was measured here, or that nothing was."""

from ridgeline.explain.explorers import figures
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import H100


def ten_x(batch: int = 32, parameters: float = 13e9, context: int = 1024, card: str = H100) -> Values:
    """Divide the tokens per second of a batch by those of one sequence."""
    found = figures("batching", batch=batch, parameters=parameters, context=context, card=card)
    return {"batching": found["gain"]}


def claims(low: float = 0.86, high: float = 0.97) -> Values:
    """Take the shares of the bandwidth from the README's table of speed."""
    return {"low": low, "high": high, "gap": 1 - low}
