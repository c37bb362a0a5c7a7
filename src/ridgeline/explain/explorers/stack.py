"""Five techniques on top of each other: KV cache, batching, paging, fewer bits, drafts, and what each multiplies."""

from ridgeline.core.errors import ConfigError
from ridgeline.cost.roofline import bytes_per_weight
from ridgeline.cost.speculation import tokens_per_round
from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.explain.explorers.paging import half_block
from ridgeline.explain.limits import decode, kv_bytes, limit, room


def explore(
    parameters: float = 13e9,
    layers: int = 40,
    kv_heads: int = 40,
    head_dim: int = 128,
    context: int = 1024,
    reserved: int = 2048,
    block: int = 16,
    acceptance: float = 0.8,
    drafts: int = 4,
    draft_ratio: float = 0.11,
    card: str = "h100-sxm",
) -> Found:
    """Take the tokens per second that each technique allows, with those before it."""
    int4, whole = bytes_per_weight("int4", 1, 128), kv_bytes(reserved, layers, kv_heads, head_dim)
    kv, paged = (kv_bytes(context + more, layers, kv_heads, head_dim) for more in (0, half_block(block)))

    def fits(sequence: float, weight: float) -> int:
        most = room(card, parameters, sequence, weight=weight)
        if not most:
            raise ConfigError(f"stack: {card} has no room for a sequence beside the weights, or names no memory")
        return most

    def per_s(batch: int, weight: float) -> float:
        return batch / decode(card, parameters, batch, kv, weight=weight).seconds

    naive_s = limit(card, flops=2 * parameters * context, weight_bytes=2 * parameters).seconds
    batches = fits(whole, 2), fits(paged, 2), fits(paged, int4)
    rows, sizes = batches[2] * (drafts + 1), int4 * parameters
    round_s = limit(card, flops=2 * parameters * rows, weight_bytes=sizes, kv_bytes=batches[2] * kv).seconds
    round_s += drafts * draft_ratio * batches[2] / per_s(batches[2], int4)
    found = (
        ("nothing", 1 / naive_s, f"every token computes all {context:,} again"),
        ("kv_cache", per_s(1, 2), "one token a step, its cache read"),
        ("batching", per_s(batches[0], 2), f"{batches[0]:,} sequences, {reserved:,} tokens reserved for each"),
        ("paging", per_s(batches[1], 2), f"{batches[1]:,} sequences in blocks of {block}"),
        ("int4", per_s(batches[2], int4), f"{batches[2]:,} sequences beside smaller weights"),
        ("drafts", batches[2] * tokens_per_round((acceptance,) * drafts) / round_s, f"{rows:,} rows a step"),
    )
    figures = [Figure(name, value, "tokens/s", formula, "datasheet") for name, value, formula in found]
    gains = [(name, value / before) for (name, value, _), (_, before, _) in zip(found[1:], found)]
    figures += [Figure(f"{name}_gain", gain, "×", "with it ÷ without", "datasheet") for name, gain in gains]
    most = found[-1][1] / found[0][1]
    product = " · ".join(f"{gain:.3g}" for _, gain in gains)
    sentence = f"{product} = {most:,.0f}×: a limit, and each factor holds only behind those before it."
    return sentence, figures, (Series("stack", "techniques", "tokens/s", [(i, row[1]) for i, row in enumerate(found)]),)
