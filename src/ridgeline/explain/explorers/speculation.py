"""Speculative decoding: tokens of a round, its cost, the best number of drafts, and rounds over a toy vocabulary."""

import numpy as np

from ridgeline.core.step import Trial, Weights
from ridgeline.cost.speculation import speedup, tokens_per_round
from ridgeline.decoding.random_sample import random_word
from ridgeline.decoding.rejection import PROPOSAL, sample, verify
from ridgeline.explain.exploration import Figure, Found, Grid, Series

MAX_DRAFTS = 16
TOY = ("the", "a", "one", "xyz")
TARGET = (0.5, 0.3, 0.2, 0.0)  # never says xyz, which the draft says instead where it errs: accepted with α
ROUNDS, SHOWN = 100, 6


def explore(acceptance: float = 0.8, drafts: int = 4, draft_ratio: float = 0.11) -> Found:
    """Divide the tokens of a round by its steps."""

    def at(drafts: int) -> float:
        return speedup((acceptance,) * drafts, draft_ratio)

    tokens = tokens_per_round((acceptance,) * drafts)
    best = max(range(MAX_DRAFTS + 1), key=at)
    cost = 1 + drafts * draft_ratio
    toy = _rounds(acceptance, drafts)
    drawn = sum(len(kinds) - kinds.count("1") for _, _, kinds in toy) / ROUNDS
    figures = (
        Figure("tokens", tokens, "tokens", "1 + α + α² + … + αᵏ", "counted"),
        Figure("drawn", drawn, "tokens", f"mean of {ROUNDS} rounds by the engine's rule, a toy vocabulary", "counted"),
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
    return (
        sentence,
        figures,
        (series, Grid("rounds: drafts that are accepted or rejected ✗, then + the target's own token", toy[:SHOWN])),
    )


def _rounds(acceptance: float, drafts: int) -> list[tuple[str, list[str], str]]:
    """Draw rounds by the rule that the engine accepts by; a row ends with the token that the target gives."""
    target_V = np.array(TARGET, np.float32) * (1 << 20)
    draft_V: Weights = np.round(target_V * np.float32(acceptance))
    draft_V[-1] = (1 << 20) - draft_V.sum()
    rows: list[tuple[str, list[str], str]] = []
    for seed in range(ROUNDS):
        words, kinds = list[str](), ""
        for number in range(drafts):
            drafted = sample(draft_V, random_word(seed ^ PROPOSAL, number))
            token = verify(target_V, Trial(drafted, draft_V), seed, number)
            words, kinds = [*words, TOY[drafted] + "✗" * (token != drafted)], kinds + "01"[token != drafted]
            if token != drafted:
                break
        else:
            token = sample(target_V, random_word(seed, drafts))
        rows.append((f"round {seed + 1}", [*words, f"+{TOY[token]}"], kinds + "2"))
    return rows
