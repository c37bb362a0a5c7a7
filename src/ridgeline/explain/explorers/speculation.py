"""Speculative decoding: tokens of a round, its cost, and the best number of drafts."""

from ridgeline.cost.speculation import speedup, tokens_per_round
from ridgeline.explain.exploration import Figure, Found, Series

MAX_DRAFTS = 16


def explore(acceptance: float = 0.8, drafts: int = 4, draft_ratio: float = 0.11) -> Found:
    """Divide the tokens of a round by its steps."""

    def at(drafts: int) -> float:
        return speedup((acceptance,) * drafts, draft_ratio)

    tokens = tokens_per_round((acceptance,) * drafts)
    best = max(range(MAX_DRAFTS + 1), key=at)
    cost = 1 + drafts * draft_ratio
    figures = (
        Figure("tokens", tokens, "tokens", "1 + α + α² + … + αᵏ", "counted"),
        Figure("cost", cost, "steps", f"1 + {drafts} · {draft_ratio:g}", "counted"),
        Figure("speedup", at(drafts), "×", f"{tokens:.3f} ÷ {cost:.3g}", "counted"),
        Figure("best_drafts", best, "drafts", f"of 0 to {MAX_DRAFTS}", "counted"),
        Figure("best_speedup", at(best), "×", "with that many", "counted"),
    )
    sentence = (
        f"{tokens:.2f} tokens a round cost {cost:.2f} steps: {at(drafts):.2f}× while memory-bound; the best "
        f"number of drafts is {best}: {at(best):.2f}×."
    )
    series = Series("drafts", "drafts", "×", [(float(count), at(count)) for count in range(MAX_DRAFTS + 1)])
    return sentence, figures, (series,)
