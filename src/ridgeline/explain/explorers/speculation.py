"""Speculative decoding: tokens of a round, its cost, and the best number of drafts."""

from typing import Annotated

import msgspec
from msgspec import Meta

from ridgeline.cost.speculation import speedup, tokens_per_round
from ridgeline.explain.exploration import Exploration, Figure, Series

MAX_DRAFTS = 16


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drafter and how often it is right."""

    acceptance: Annotated[float, Meta(ge=0, le=1, description="Probability that a draft is accepted.")] = 0.8
    drafts: Annotated[int, Meta(ge=0, le=MAX_DRAFTS, description="Drafts of a round.")] = 4
    draft_ratio: Annotated[float, Meta(ge=0, le=10, description="Time of a draft step ÷ time of a target step.")] = 0.11


def explore(inputs: Inputs) -> Exploration:
    """Divide the tokens of a round by its steps."""

    def at(drafts: int) -> float:
        return speedup((inputs.acceptance,) * drafts, inputs.draft_ratio)

    tokens = tokens_per_round((inputs.acceptance,) * inputs.drafts)
    best = max(range(MAX_DRAFTS + 1), key=at)
    cost = 1 + inputs.drafts * inputs.draft_ratio
    figures = (
        Figure("tokens", tokens, "tokens", "1 + α + α² + … + αᵏ", "counted"),
        Figure("cost", cost, "steps", f"1 + {inputs.drafts} · {inputs.draft_ratio:g}", "counted"),
        Figure("speedup", at(inputs.drafts), "×", f"{tokens:.3f} ÷ {cost:.3g}", "counted"),
        Figure("best_drafts", best, "drafts", f"of 0 to {MAX_DRAFTS}", "counted"),
        Figure("best_speedup", at(best), "×", "with that many", "counted"),
    )
    sentence = (
        f"{tokens:.2f} tokens a round cost {cost:.2f} steps: {at(inputs.drafts):.2f}× while memory-bound; the best "
        f"number of drafts is {best}: {at(best):.2f}×."
    )
    series = Series("drafts", "drafts", "×", [(float(count), at(count)) for count in range(MAX_DRAFTS + 1)])
    return Exploration("speculation", msgspec.structs.asdict(inputs), sentence, figures, (series,))
