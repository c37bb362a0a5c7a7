"""Arithmetic intensity: where matrix products and attention stand beside the ridge."""

from bisect import bisect_left
from math import inf

from ridgeline.explain.lectures.row import Values, row
from ridgeline.explain.limits import H100, attention_intensity, bandwidth, limit, linear_intensity, peak, ridge
from ridgeline.program.ops.attention import visible_keys


@row("ridge", "D2", "about 295", "≈", "{ridge:1} FLOPs per byte", "datasheet", ridge=295)
def ridge_of_h100(card: str = H100) -> Values:
    """Divide the peak in bf16 by the bandwidth."""
    return {"ridge": ridge(card)}


@row("intensity-1", "D2", "about 1.0 for one token", "≈", "{intensity:4}", intensity=1.0)
def intensity_1(tokens: int = 1, inputs: int = 4096, outputs: int = 11008) -> Values:
    """Divide the FLOPs of a product by the bytes of weights, inputs and outputs."""
    return {"intensity": linear_intensity(tokens, inputs, outputs)}


@row("intensity-4096", "D2", "about 2,731 for 4,096 tokens", "✗", "{intensity:1}", intensity=2731)
def intensity_4096(tokens: int = 4096, inputs: int = 4096, outputs: int = 11008) -> Values:
    """Divide the FLOPs of a product by the bytes of weights, inputs and outputs."""
    return {"intensity": linear_intensity(tokens, inputs, outputs)}


@row("intensity-295", "D2", "about 270 for 295 tokens", "≈", "{intensity:1}", intensity=270)
def intensity_295(tokens: int = 295, inputs: int = 4096, outputs: int = 11008) -> Values:
    """Divide the FLOPs of a product by the bytes of weights, inputs and outputs."""
    return {"intensity": linear_intensity(tokens, inputs, outputs)}


@row(
    "break-even",
    "D2 D9",
    "compute-bound above 295 tokens",
    "≈",
    "from {tokens:0} tokens on, for this matrix: its inputs and outputs cross memory too",
    "datasheet",
    tokens=295,
)
def break_even(inputs: int = 4096, outputs: int = 11008, card: str = H100) -> Values:
    """Find the fewest tokens whose intensity reaches the ridge."""
    limit_tokens = 1 << 20

    def intensity(tokens: int) -> float:
        return linear_intensity(tokens, inputs, outputs)

    fewest = bisect_left(range(limit_tokens), ridge(card), key=intensity)
    return {"tokens": fewest if fewest < limit_tokens else inf}


@row(
    "b64",
    "D2",
    "a batch of 64 is memory-bound",
    "=",
    "yes: {most:1%} of the peak at most, {intensity:1} FLOPs per byte against {ridge:1}",
    "datasheet",
)
def b64(batch: int = 64, inputs: int = 4096, outputs: int = 11008, card: str = H100) -> Values:
    """Divide the batch, which no matrix's intensity exceeds, by the ridge."""
    return {
        "most": batch / ridge(card),
        "intensity": linear_intensity(batch, inputs, outputs),
        "ridge": ridge(card),
    }


@row(
    "attn-prefill",
    "D2 E",
    "S ÷ 2 = 2,048",
    "≈",
    "{unmasked:0} without a mask; causal attention does half of it: {causal:0}",
    unmasked=2048,
)
def attn_prefill(tokens: int = 4096) -> Values:
    """Divide the FLOPs of both products by the bytes of queries, keys, values and outputs."""
    pairs, keys = visible_keys(tokens, tokens, None)
    return {
        "unmasked": attention_intensity(tokens * tokens, tokens, keys),
        "causal": attention_intensity(pairs, tokens, keys),
    }


@row(
    "attn-decode",
    "D2 E",
    "S ÷ (S + 1) < 1, always",
    "✗",
    "{alone:4} where every query head has keys of its own; {shared:2} where {sharing:0} share them: still far below "
    "the "
    "ridge of {ridge:0}, and no function of the batch",
    "datasheet",
    shared=1,
)
def attn_decode(context: int = 4096, sharing: int = 8, card: str = H100) -> Values:
    """Divide the FLOPs of one query by the bytes of the keys and values that it reads."""
    pairs, keys = visible_keys(1, context, None)
    return {
        "alone": attention_intensity(pairs, 1, keys),
        "shared": attention_intensity(pairs, 1, keys, sharing),
        "sharing": sharing,
        "ridge": ridge(card),
    }


@row(
    "flash",
    "B",
    "FlashAttention is 2 to 4 times as fast",
    "lit",
    "it moves {flash_bytes:1MB} a head instead of {naive_bytes:0MB}, {ratio:0x} less; limits on an H100 {flash_s:4ms} "
    "and "
    "{naive_s:4ms}; here: not measured, there is no kernel without it",
    "datasheet",
)
def flash(tokens: int = 4096, head_dim: int = 128, passes: int = 4, card: str = H100) -> Values:
    """Count scores and probabilities as written and read once each, or not at all; causal FLOPs either way."""
    operands = 4 * tokens * head_dim * 2
    naive = passes * tokens * tokens * 2 + operands
    flops = 4 * head_dim * visible_keys(tokens, tokens, None)[0]
    return {
        "flash_bytes": operands,
        "naive_bytes": naive,
        "ratio": naive / operands,
        "flash_s": limit(card, flops=flops, weight_bytes=operands).seconds,
        "naive_s": limit(card, flops=flops, weight_bytes=naive).seconds,
    }


@row(
    "intensity-n",
    "A",
    "N requests raise the intensity N times",
    "≈",
    "that of the weights: {one:2} to {many:1} for {requests:0} requests; attention stays at {attention:2}",
    ratio=64,
)
def intensity_n(requests: int = 64, context: int = 4096, inputs: int = 4096, outputs: int = 11008) -> Values:
    """Compare a product, whose weights all requests share, with attention, whose keys they do not."""
    one, many = (linear_intensity(count, inputs, outputs) for count in (1, requests))
    attention = attention_intensity(context, 1, context)
    return {"one": one, "many": many, "requests": requests, "attention": attention, "ratio": many / one}


@row(
    "out-vs-in",
    "B",
    "a token out costs 3 to 10 times a token in",
    "lit",
    "in time, with 13B at 1,024 tokens: {alone:0x} at batch 1, {some:1x} at {some_batch:0}, {many:1x} at "
    "{many_batch:0}; "
    "what is charged is a price, not a cost",
    "datasheet",
)
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

    return {
        "alone": ratio(1),
        "some": ratio(some_batch),
        "many": ratio(many_batch),
        "some_batch": some_batch,
        "many_batch": many_batch,
    }
