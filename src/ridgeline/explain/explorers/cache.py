"""With a KV cache or without: tokens computed, and pairs of a query and a key."""

from ridgeline.explain.exploration import Figure, Found
from ridgeline.program.ops.attention import visible_keys


def explore(prompt: int = 4096, output: int = 256) -> Found:
    """Count what every pass computes: all tokens so far, or only the new one."""
    lengths = range(prompt, prompt + output)
    naive, cached = sum(lengths), lengths[-1]
    naive_pairs = sum(visible_keys(length, length, None)[0] for length in lengths)
    cached_pairs = visible_keys(cached, cached, None)[0]
    span = f"{lengths[0]:,} + … + {lengths[-1]:,}"
    figures = (
        Figure("first_pass", lengths[0], "tokens", "the prompt", "counted"),
        Figure("last_pass", lengths[-1], "tokens", "the pass that makes a token does not have it yet", "counted"),
        Figure("naive_tokens", naive, "tokens", span, "counted"),
        Figure("cached_tokens", cached, "tokens", f"{prompt:,} + {output - 1:,}", "counted"),
        Figure("tokens_saved", naive / cached, "×", "without ÷ with", "counted"),
        Figure("pairs_saved", naive_pairs / cached_pairs, "×", "query-key pairs without ÷ with", "counted"),
    )
    sentence = (
        f"A cache computes {cached:,} tokens instead of {naive:,}: {naive / cached:,.0f}× fewer, and "
        f"{naive_pairs / cached_pairs:,.0f}× fewer query-key pairs."
    )
    return sentence, figures, ()
