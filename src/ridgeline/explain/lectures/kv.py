"""Bytes of the KV cache, and what shares them."""

from ridgeline.cost.account import kv_bytes as kv_bytes_of
from ridgeline.cost.account import weight_bytes
from ridgeline.explain.explorers import figures
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import lowered


def kv_70b_4k(context: int = 4096, layers: int = 80, kv_heads: int = 8, weights: float = 140e9) -> Values:
    """Multiply 2 · layers · KV heads · head_dim · tokens · 2 bytes."""
    size = figures("kv", context=context, layers=layers, kv_heads=kv_heads)["all"]
    return {"kv_bytes": size, "share": size / weights}


def kv_70b_prod(batch: int = 64, context: int = 32_768, weights: float = 140e9, claimed_batch: int = 16) -> Values:
    """Multiply the bytes of a token by all tokens."""
    size, claimed = (figures("kv", batch=count, context=context)["all"] for count in (batch, claimed_batch))
    return {"kv_bytes": size, "times": size / weights, "claimed_bytes": claimed}


def kv_8b(model: str = "llama-3-8b", context: int = 131_072) -> Values:
    """Sum the states and the weights of the model's program."""
    found = lowered(model)
    token, whole = (kv_bytes_of(found, tokens, 2) for tokens in (1, context))
    return {"token_bytes": token, "kv_bytes": whole, "weight_bytes": weight_bytes(found, 2)}


def kv_70b_mha(context: int = 32_768, heads: int = 64, kv_heads: int = 8) -> Values:
    """Multiply with all heads, and with those that keep keys."""
    mha, gqa = (figures("kv", context=context, kv_heads=count)["all"] for count in (heads, kv_heads))
    return {"mha_bytes": mha, "gqa_bytes": gqa}


def gqa(heads: int = 64, kv_heads: int = 8) -> Values:
    """Divide the query heads by the KV heads."""
    return {"ratio": gqa_mqa(heads, kv_heads)["gqa"]}


def gqa_mqa(heads: int = 64, kv_heads: int = 8) -> Values:
    """Divide the query heads by the KV heads."""
    found = figures("variants", heads=heads, kv_heads=kv_heads)
    return {name: found["mha"] / found[name] for name in ("gqa", "mqa")}


def paging(mean: int = 400, longest: int = 2048, block: int = 16, block_large: int = 32) -> Values:
    """Compare the tokens of a mean output with those that are reserved for it."""
    found, large = (figures("paging", mean=mean, reserved=longest, block=size) for size in (block, block_large))
    return {"reserved": found["reserved_waste"], "paged": found["paged_waste"], "paged_large": large["paged_waste"]}


def variants(
    heads: int = 64,
    head_dim: int = 128,
    kv_heads: int = 8,
    latent_dim: int = 512,
    rope_dim: int = 64,
    context: int = 32_768,
    window: int = 4096,
    deepseek_heads: int = 128,
    deepseek_layers: int = 60,
) -> Values:
    """Count the entries that each kind of state keeps of a token."""
    sizes = {"head_dim": head_dim, "kv_heads": kv_heads, "latent_dim": latent_dim, "rope_dim": rope_dim}
    found, other = (
        figures("variants", heads=count, **sizes, context=context, window=window) for count in (heads, deepseek_heads)
    )
    return {
        **{name: found[name] / 2 for name in ("mha", "mqa", "gqa", "mla")},
        "mla_ratio": found["mha"] / found["mla"],
        "deepseek_ratio": other["mha"] / other["mla"],
        "deepseek_bytes": deepseek_layers * found["mla"],
        "sliding": found["mixed_share"],
    }
