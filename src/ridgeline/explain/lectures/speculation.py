"""Speculation: what is accepted, what a round makes, what it costs."""

import numpy as np

from ridgeline.explain.explorers import figures
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import H100, limit, ridge


def spec_toy(
    q: tuple[float, float] = (0.3, 0.7), p: tuple[float, float] = (0.5, 0.5), draws: int = 100_000, seed: int = 0
) -> Values:
    """Draw drafts from p, accept each with min(1, q ÷ p), draw the others from what q has more than p, and count."""
    random, target, draft = np.random.default_rng(seed), np.array(q), np.array(p)
    drafts = (random.random(draws) >= p[0]).astype(np.intp)
    is_accepted = random.random(draws) < (target / draft)[drafts]
    spare = np.maximum(target - draft, 0)
    others = (random.random(draws) >= spare[0] / spare.sum()).astype(np.intp)
    counts = np.bincount(np.where(is_accepted, drafts, others), minlength=2)
    return {
        "a": float(counts[0] / draws),
        "b": float(counts[1] / draws),
        "accepted": float(np.minimum(target, draft).sum()),
        "measured_accepted": float(is_accepted.mean()),
        "chi2": float(((counts - draws * target) ** 2 / (draws * target)).sum()),
        "critical": 10.83,  # one degree of freedom, one in a thousand
    }


def spec_tokens(drafts: int = 4, acceptance: float = 0.9) -> Values:
    """Sum α, α², … over the drafts, and the target's own token."""
    return {"tokens": _tokens(drafts, acceptance), "bound": drafts * acceptance + 1}


def spec_speedup(drafts: int = 4, acceptance: float = 0.8, draft_ratio: float = 0.11) -> Values:
    """Divide the tokens of a round by its cost, and try the numbers of drafts to 16."""
    found = figures("speculation", drafts=drafts, acceptance=acceptance, draft_ratio=draft_ratio)
    return {"best": found["best_drafts"]} | {
        name: found[name] for name in ("tokens", "cost", "speedup", "best_speedup")
    }


def spec_range(drafts: int = 4, low: float = 0.7, high: float = 0.9) -> Values:
    """Sum α, α², … over the drafts, and the target's own token."""
    return {"low": _tokens(drafts, low), "high": _tokens(drafts, high)}


def spec_cost(drafts: int = 4, parameters: float = 70e9, card: str = H100) -> Values:
    """Compare the positions of a verifying step with those of a plain one."""
    verified, size = drafts + 1, 2 * parameters
    plain_s, step_s = (limit(card, flops=size * rows, weight_bytes=size).seconds for rows in (1, verified))
    counts = {"verified": verified, "plain": 1, "ratio": verified}
    return {**counts, "plain_s": plain_s, "step_s": step_s, "share": verified / ridge(card)}


def spec_code(drafts: int = 4) -> Values:
    """Count a round in which all drafts are accepted."""
    return {"sketch": drafts, "most": _tokens(drafts, 1.0)}


def _tokens(drafts: int, acceptance: float) -> float:
    return figures("speculation", drafts=drafts, acceptance=acceptance)["tokens"]
