"""Memory that no token fills: reservations against blocks, which outputs of one prompt share until they write."""

from ridgeline.cache.layout import CacheLayout, GroupLayout
from ridgeline.cache.manager import CacheManager
from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import Figure, Found, Grid, Series

SHOWN = 12  # blocks of a table


def explore(mean: float = 400, reserved: int = 2048, block: int = 16, prompt: int = 100, outputs: int = 3) -> Found:
    """Compare a reservation with blocks, of which the last is half empty, and fork a sequence in the engine's cache."""
    if mean > reserved:
        raise ConfigError(f"paging: a mean of {mean:g} tokens is more than the {reserved} reserved")
    whole = 1 - mean / reserved

    def paged(block: int) -> float:
        return half_block(block) / (mean + half_block(block))

    gain = (1 - paged(block)) / (1 - whole)
    tables, copies, used = _forked(prompt, block, outputs)
    alone = outputs * -(-(prompt + 1) // block)
    figures = (
        Figure("reserved_waste", whole, "share", f"1 - {mean:g} ÷ {reserved}", "counted"),
        Figure("paged_waste", paged(block), "share", "half a block of each sequence", "counted"),
        Figure("more_sequences", gain, "×", "in the same memory", "counted"),
        Figure(
            "shared_blocks", used, "blocks", f"{outputs} outputs of a prompt of {prompt:,}, by the cache", "counted"
        ),
        Figure("unshared_blocks", alone, "blocks", f"{outputs} · {alone // outputs}, each with its own", "counted"),
        Figure("copies", copies, "blocks", "copied on write: a shared one that is not full", "counted"),
    )
    sentence = f"Blocks waste {paged(block):.1%} instead of {whole:.1%}: {gain:.2f}× the sequences."
    series = Series("blocks", "tokens of a block", "share", [(1 << i, paged(1 << i)) for i in range(9)])
    seen = {number for table in tables for number in table if sum(number in other for other in tables) > 1}
    rows = [
        (f"output {i}", [str(number) for number in table], "".join("0" if n in seen else "1" for n in table))
        for i, table in enumerate([table[-SHOWN:] for table in tables[:8]])
    ]
    return (
        sentence,
        figures,
        (series, Grid("the last blocks of each output, after its first token; alike: shared", rows)),
    )


def half_block(block: int) -> float:
    """Return the tokens that the last block of a sequence has room for, in the mean."""
    return (block - 1) / 2


def _forked(tokens: int, block: int, outputs: int) -> tuple[list[list[int]], int, int]:
    """Return the block tables of outputs that each wrote a token behind one prompt, the copies, and the blocks used."""
    blocks = outputs * (tokens // block + 2)
    cache = CacheManager(CacheLayout(block, (GroupLayout("full", (0,), None, 1, blocks),)), prefix_caching=False)
    cache.admit(0, range(tokens))
    cache.reserve(0, tokens)
    cache.commit(0, range(tokens), tokens)
    for child in range(1, outputs):
        cache.fork(0, child)
    copies = sum(len(cache.reserve(output, tokens + 1) or ()) for output in range(outputs))
    return [list(cache.tables(output)[0].blocks) for output in range(outputs)], copies, cache.stats().groups[0].used
