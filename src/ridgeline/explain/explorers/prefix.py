"""Prefix reuse: what of a prompt has to be computed when others began alike, and the tree that finds it."""

from ridgeline.cache.layout import CacheLayout, GroupLayout
from ridgeline.cache.manager import CacheManager
from ridgeline.explain.exploration import Figure, Found, Grid
from ridgeline.program.ops.attention import visible_keys

SHOWN = 32  # cells of a row


def explore(shared: int = 1000, question: int = 100, hit: float = 1.0, block: int = 16) -> Found:
    """Count the tokens computed with and without reuse, and ask the engine's cache what it serves of three prompts."""
    whole = shared + question
    computed = question + (1 - hit) * shared
    pairs = visible_keys(question, whole, None)[0] / visible_keys(whole, whole, None)[0]
    missed = f"{question:,} + {1 - hit:g} · {shared:,}"
    served = _served(shared, question, block)
    figures = (
        Figure("computed", computed, "tokens", missed, "counted"),
        Figure("saved", 1 - computed / whole, "share", "of the prompt's tokens", "counted"),
        Figure("ratio", whole / computed, "×", "without ÷ with", "counted"),
        Figure("pairs_left", pairs, "share", "query-key pairs of a hit: its keys are still read", "counted"),
        Figure("whole_blocks", served[1], "tokens", f"served by the cache, in blocks of {block}", "counted"),
        Figure("branch", served[2], "tokens", "served of a prompt that differs half-way", "counted"),
    )
    sentence = f"{computed:,.0f} of {whole:,} tokens are computed: {whole / computed:.1f}× less for the linear layers."
    count = -(-whole // block)
    cells = min(SHOWN, count)
    kinds = ["".join("0" if i * count // cells < hit // block else "1" for i in range(cells)) for hit in served]
    names = ("first prompt", "same beginning", "half of it")
    rows = [(name, ["=+"[int(each)] for each in kind], kind) for name, kind in zip(names, kinds)]
    return sentence, figures, (Grid("blocks of three prompts: = found in the tree, + computed", rows),)


def _served(shared: int, question: int, block: int) -> list[int]:
    """Return what the cache serves of three prompts, one after the other; the last leaves the others half-way."""
    half, end = shared // 2, shared + question
    prompts = [[*range(end)], [*range(shared), *range(end, end + question)], [*range(half), *range(-end, -half)]]
    layout = CacheLayout(block, (GroupLayout("full", (0,), None, 1, 3 * (end // block + 1)),))
    cache, served = CacheManager(layout), list[int]()
    for seq_id, prompt in enumerate(prompts):
        served.append(cache.admit(seq_id, prompt).num_tokens)
        cache.reserve(seq_id, len(prompt))
        cache.commit(seq_id, prompt, len(prompt))
    return served
