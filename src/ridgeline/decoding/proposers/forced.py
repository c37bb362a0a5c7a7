"""Drafts what an output's grammar leaves no choice of, such as the keys of a schema: a token of it is always right."""

from ridgeline.core.speculation import SpeculationConfig
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategy import SequenceView


def build(config: SpeculationConfig) -> "Forced":
    return Forced()


class Forced:
    """Proposes the tokens that alone are allowed; nothing for sequences without a grammar."""

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        tokens = () if view.grammar is None else view.grammar.forced()[:max_tokens]
        return Draft(tokens, 0) if tokens else None

    def forget(self, view: SequenceView) -> None:
        """Do nothing: the grammar knows it all."""
