"""Prefix reuse: what of a prompt has to be computed when others began alike."""

from ridgeline.explain.exploration import Figure, Found
from ridgeline.program.ops.attention import visible_keys


def explore(shared: int = 1000, question: int = 100, hit: float = 1.0) -> Found:
    """Count the tokens computed with and without reuse."""
    whole = shared + question
    computed = question + (1 - hit) * shared
    pairs = visible_keys(question, whole, None)[0] / visible_keys(whole, whole, None)[0]
    missed = f"{question:,} + {1 - hit:g} · {shared:,}"
    figures = (
        Figure("computed", computed, "tokens", missed, "counted"),
        Figure("saved", 1 - computed / whole, "share", "of the prompt's tokens", "counted"),
        Figure("ratio", whole / computed, "×", "without ÷ with", "counted"),
        Figure("pairs_left", pairs, "share", "query-key pairs of a hit: its keys are still read", "counted"),
    )
    sentence = f"{computed:,.0f} of {whole:,} tokens are computed: {whole / computed:.1f}× less for the linear layers."
    return sentence, figures, ()
