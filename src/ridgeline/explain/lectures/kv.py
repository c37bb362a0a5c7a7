"""Bytes of the KV cache, and what shares them."""

from ridgeline.cost.account import kv_bytes as kv_bytes_of
from ridgeline.cost.account import weight_bytes
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import kv_bytes, lowered
from ridgeline.program.op import KvState, LatentState


def kv_70b_4k(context: int = 4096, layers: int = 80, kv_heads: int = 8, weights: float = 140e9) -> Values:
    """Multiply 2 · layers · KV heads · head_dim · tokens · 2 bytes."""
    size = kv_bytes(context, layers, kv_heads, 128)
    return {"kv_bytes": size, "share": size / weights}


def kv_70b_prod(batch: int = 64, context: int = 32_768, weights: float = 140e9, claimed_batch: int = 16) -> Values:
    """Multiply the bytes of a token by all tokens."""
    size = kv_bytes(batch * context, 80, 8, 128)
    claimed = kv_bytes(claimed_batch * context, 80, 8, 128)
    return {"kv_bytes": size, "times": size / weights, "claimed_bytes": claimed}


def kv_8b(model: str = "llama-3-8b", context: int = 131_072) -> Values:
    """Sum the states and the weights of the model's program."""
    found = lowered(model)
    token, whole = (kv_bytes_of(found, tokens, 2) for tokens in (1, context))
    return {"token_bytes": token, "kv_bytes": whole, "weight_bytes": weight_bytes(found, 2)}


def kv_70b_mha(context: int = 32_768, heads: int = 64, kv_heads: int = 8) -> Values:
    """Multiply with all heads, and with those that keep keys."""
    mha, gqa = (kv_bytes(context, 80, count, 128) for count in (heads, kv_heads))
    return {"mha_bytes": mha, "gqa_bytes": gqa}


def gqa(heads: int = 64, kv_heads: int = 8) -> Values:
    """Divide the query heads by the KV heads."""
    return {"ratio": kv_bytes(1, 1, heads, 128) / kv_bytes(1, 1, kv_heads, 128)}


def gqa_mqa(heads: int = 64, kv_heads: int = 8) -> Values:
    """Divide the query heads by the KV heads."""
    whole = kv_bytes(1, 1, heads, 128)
    return {"gqa": whole / kv_bytes(1, 1, kv_heads, 128), "mqa": whole / kv_bytes(1, 1, 1, 128)}


def paging(mean: int = 400, longest: int = 2048, block: int = 16, block_large: int = 32) -> Values:
    """Compare the tokens of a mean output with those that are reserved for it."""

    def waste(reserved: float) -> float:
        return reserved / (mean + reserved)

    paged, paged_large = (waste((tokens - 1) / 2) for tokens in (block, block_large))
    return {"reserved": 1 - mean / longest, "paged": paged, "paged_large": paged_large}


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

    def entries(count: int) -> float:
        return KvState(count, head_dim, None).bytes_per_token(2) / 2

    latent = LatentState(latent_dim, rope_dim).bytes_per_token(2)
    return {
        "mha": entries(heads),
        "mqa": entries(1),
        "gqa": entries(kv_heads),
        "mla": latent / 2,
        "mla_ratio": 2 * entries(heads) / latent,
        "deepseek_ratio": 2 * entries(deepseek_heads) / latent,
        "deepseek_bytes": deepseek_layers * latent,
        "sliding": (context + 6 * min(window, context)) / (7 * context),
    }
