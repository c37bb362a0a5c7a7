"""Speculation: what is accepted, what a round makes, what it costs."""

import numpy as np

from ridgeline.cost.speculation import speedup, tokens_per_round
from ridgeline.explain.lectures.row import Values, row
from ridgeline.explain.limits import H100, limit, ridge


@row(
    "spec-toy",
    "D5",
    "drafts from p = (0.5, 0.5) for a target q = (0.3, 0.7) end as P(A) = 0.3, P(B) = 0.7",
    "=",
    "they do: {draws:0} draws give {a:3} and {b:3}, χ² = {chi2:2}, below {critical:2}; α = Σ min(p, q) = {accepted:1}",
    a=0.3,
    b=0.7,
)
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
        "draws": draws,
        "chi2": float(((counts - draws * target) ** 2 / (draws * target)).sum()),
        "critical": 10.83,  # one degree of freedom, one in a thousand
    }


@row(
    "spec-tokens",
    "D5 D9",
    "k·α + 1 = 4.6 tokens a round for k = 4, α = 0.9",
    "✗",
    "{tokens:2}: a draft counts only if all before it were accepted; {bound:1} is a bound",
    tokens=4.6,
)
def spec_tokens(drafts: int = 4, acceptance: float = 0.9) -> Values:
    """Sum α, α², … over the drafts, and the target's own token."""
    return {"tokens": tokens_per_round((acceptance,) * drafts), "bound": drafts * acceptance + 1}


@row(
    "spec-speedup",
    "D5",
    "4.2 ÷ 1.44 = 2.9 times for α = 0.8, k = 4, a draft of 0.11",
    "✗",
    "{tokens:2} ÷ {cost:2} = {speedup:2x}; the best k is {best:0}: {best_speedup:2x}, and all of it only while a "
    "round's "
    "tokens are below the ridge",
    speedup=2.9,
)
def spec_speedup(drafts: int = 4, acceptance: float = 0.8, draft_ratio: float = 0.11) -> Values:
    """Divide the tokens of a round by its cost, and try the numbers of drafts to 16."""
    best = max(range(1, 17), key=lambda count: speedup((acceptance,) * count, draft_ratio))
    return {
        "tokens": tokens_per_round((acceptance,) * drafts),
        "cost": 1 + drafts * draft_ratio,
        "speedup": speedup((acceptance,) * drafts, draft_ratio),
        "best": best,
        "best_speedup": speedup((acceptance,) * best, draft_ratio),
    }


@row("spec-range", "B", "3 to 5 tokens a round for α from 0.7 to 0.9, k = 4", "✗", "{low:2} to {high:2}", high=5)
def spec_range(drafts: int = 4, low: float = 0.7, high: float = 0.9) -> Values:
    """Sum α, α², … over the drafts, and the target's own token."""
    return {name: tokens_per_round((rate,) * drafts) for name, rate in (("low", low), ("high", high))}


@row(
    "spec-cost",
    "B",
    "both ways process k + 1 positions; k tokens for the cost of 1",
    "✗",
    "{verified:0} positions against {plain:0}: {ratio:0x} the arithmetic, in {step_s:1ms} like {plain_s:1ms} while "
    "memory-bound, here at {share:1%} of the ridge; it makes 1 to {verified:0} tokens",
    "datasheet",
)
def spec_cost(drafts: int = 4, parameters: float = 70e9, card: str = H100) -> Values:
    """Compare the positions of a verifying step with those of a plain one."""
    verified = drafts + 1
    times = [limit(card, flops=2 * parameters * rows, weight_bytes=2 * parameters).seconds for rows in (1, verified)]
    return {
        "verified": verified,
        "plain": 1,
        "ratio": verified,
        "plain_s": times[0],
        "step_s": times[1],
        "share": verified / ridge(card),
    }


@row(
    "spec-code",
    "D5",
    "a sketch that returns the accepted drafts",
    "✗",
    "it makes {sketch:0} tokens at most and reads `draft_logits`, which nothing sets; with the target's own token it "
    "is {most:0}",
    most=4,
)
def spec_code(drafts: int = 4) -> Values:
    """Count a round in which all drafts are accepted."""
    return {"sketch": drafts, "most": tokens_per_round((1.0,) * drafts)}
