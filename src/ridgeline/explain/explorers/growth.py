"""The KV cache as an output grows: what it keeps and what reading it takes, and the arithmetic that it saves."""

from ridgeline.cost.account import kv_bytes
from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.explain.limits import limit, lowered
from ridgeline.explain.pricing import price


def explore(model: str = "llama-3-8b", prompt: int = 512, output: int = 512, card: str = "h100-sxm") -> Found:
    """Price a step that computes the newest token alone, and one that computes all tokens again."""

    def stored(tokens: int) -> int:
        return kv_bytes(lowered(model), tokens, 2)

    def saved(tokens: int) -> tuple[float, float]:
        return price(model, context=tokens).cost.flops, price(model, prompt=tokens).cost.flops

    length = prompt + output
    cached, naive = saved(length)
    read_s = limit(card, kv_bytes=stored(length)).seconds
    figures = (
        Figure("per_token", stored(1), "B", "keys and values in all layers, by the program's states", "counted"),
        Figure("all", stored(length), "B", f"{prompt:,} + {output:,} tokens", "counted"),
        Figure("read", read_s, "s", "to read it once, as every step does", "datasheet"),
        Figure("step", cached, "FLOP", "of the newest token, by the op table", "counted"),
        Figure("step_without", naive, "FLOP", f"of all {length:,} tokens again", "counted"),
        Figure("saved", naive / cached, "×", "without ÷ with, in the last step", "counted"),
    )
    sentence = f"{stored(length) / 1e9:,.4g} GB stored save {naive / cached:,.0f}× of the last step's arithmetic."
    lengths = sorted({prompt + output * i // 8 for i in range(9)})
    bytes_stored = Series("stored", "tokens", "B", [(tokens, stored(tokens)) for tokens in lengths])
    without = Series(
        "arithmetic without a cache ÷ with one", "tokens", "×", [(n, saved(n)[1] / saved(n)[0]) for n in lengths]
    )
    return sentence, figures, (bytes_stored, without)
