"""Arithmetic intensity: where matrix products and attention stand beside the ridge."""

from bisect import bisect_left
from math import inf

from ridgeline.explain.explorers import figures
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import H100, attention_intensity, bandwidth, limit, linear_intensity, peak, ridge
from ridgeline.program.ops.attention import visible_keys


def ridge_of(card: str = H100) -> Values:
    """Divide the peak in bf16 by the bandwidth."""
    return {"ridge": figures("roofline", card=card)["ridge"]}


def intensity(tokens: int = 1, inputs: int = 4096, outputs: int = 11008) -> Values:
    """Divide the FLOPs of a product by the bytes of weights, inputs and outputs."""
    return {"intensity": figures("roofline", tokens=tokens, rows=inputs, columns=outputs)["intensity"]}


def break_even(inputs: int = 4096, outputs: int = 11008, card: str = H100) -> Values:
    """Find the fewest tokens whose intensity reaches the ridge."""
    limit_tokens = 1 << 20

    def intensity(tokens: int) -> float:
        return linear_intensity(tokens, inputs, outputs)

    fewest = bisect_left(range(limit_tokens), ridge(card), key=intensity)
    return {"tokens": fewest if fewest < limit_tokens else inf}


def b64(batch: int = 64, inputs: int = 4096, outputs: int = 11008, card: str = H100) -> Values:
    """Divide the batch, which no matrix's intensity exceeds, by the ridge."""
    return {"most": batch / ridge(card), "intensity": linear_intensity(batch, inputs, outputs), "ridge": ridge(card)}


def attn_prefill(tokens: int = 4096) -> Values:
    """Divide the FLOPs of both products by the bytes of queries, keys, values and outputs."""
    pairs, keys = visible_keys(tokens, tokens, None)
    unmasked, causal = (attention_intensity(count, tokens, keys) for count in (tokens * tokens, pairs))
    return {"unmasked": unmasked, "causal": causal}


def attn_decode(context: int = 4096, sharing: int = 8, card: str = H100) -> Values:
    """Divide the FLOPs of one query by the bytes of the keys and values that it reads."""
    pairs, keys = visible_keys(1, context, None)
    alone, shared = (attention_intensity(pairs, 1, keys, heads) for heads in (1, sharing))
    return {"alone": alone, "shared": shared, "ridge": ridge(card)}


def flash(tokens: int = 4096, head_dim: int = 128, passes: int = 4, card: str = H100) -> Values:
    """Count scores and probabilities as written and read once each, or not at all; causal FLOPs either way."""
    operands = 4 * tokens * head_dim * 2
    naive = passes * tokens * tokens * 2 + operands
    flops = 4 * head_dim * visible_keys(tokens, tokens, None)[0]
    flash_s, naive_s = (limit(card, flops=flops, weight_bytes=moved).seconds for moved in (operands, naive))
    ratio = naive / operands
    return {"flash_bytes": operands, "naive_bytes": naive, "ratio": ratio, "flash_s": flash_s, "naive_s": naive_s}


def intensity_n(requests: int = 64, context: int = 4096, inputs: int = 4096, outputs: int = 11008) -> Values:
    """Compare a product, whose weights all requests share, with attention, whose keys they do not."""
    one, many = (linear_intensity(count, inputs, outputs) for count in (1, requests))
    attention = attention_intensity(context, 1, context)
    return {"one": one, "many": many, "attention": attention, "ratio": many / one}


def out_vs_in(
    parameters: float = 13e9,
    sequence_bytes: float = 838_860_800,
    some_batch: int = 32,
    many_batch: int = 64,
    card: str = H100,
) -> Values:
    """Divide a token's share of a decode step by a token's share of a compute-bound prompt."""
    token_in_s = 2 * parameters / peak(card)

    def ratio(batch: int) -> float:
        return (2 * parameters + batch * sequence_bytes) / bandwidth(card) / batch / token_in_s

    return {"alone": ratio(1), "some": ratio(some_batch), "many": ratio(many_batch)}
