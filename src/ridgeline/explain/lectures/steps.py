"""Estimate what a token costs: the floor of decode, prompts, and generation with a cache or without one."""

from math import ceil

from ridgeline.cost.roofline import bytes_per_weight
from ridgeline.explain.explorers import figures
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import H100, decode, kv_bytes, limit, memory, peak, room
from ridgeline.program.ops.attention import visible_keys


def decode_floor(weight_bytes: float = 140e9, card: str = H100) -> Values:
    """Divide the bytes of the weights by the bandwidth."""
    step_s = limit(card, weight_bytes=weight_bytes).seconds
    return {"step_s": step_s, "tokens_per_s": 1 / step_s}


def ttft_100(parameters: float = 70e9, tokens: int = 100, card: str = H100) -> Values:
    """Take the larger of reading the weights and of two FLOPs for each weight and token."""
    flops, size = 2 * parameters * tokens, 2 * parameters
    room, compute_s = memory(card), flops / peak(card)
    cards = ceil(size / room)
    floor_s, cards_s = (limit(name, flops=flops, weight_bytes=size).seconds for name in (card, f"{card}:{cards}"))
    return {"floor_s": floor_s, "compute_s": compute_s, "memory_bytes": room, "cards": cards, "cards_s": cards_s}


def thousand_users(
    parameters: float = 70e9,
    users: int = 1000,
    context: int = 1024,
    group: int = 4,
    dollars_per_card_h: float = 2.0,
    card: str = H100,
) -> Values:
    """Fill the memory beside the weights with sequences, and price a step of half the users."""
    kv, batch = kv_bytes(context, layers=80, kv_heads=8, head_dim=128), users // 2
    together, cards = f"{card}:{group}", group * ceil(users / batch)
    fit_int4 = room(card, parameters, kv, weight=bytes_per_weight("int4", 1, 128)) or 0
    return {
        "batch": batch,
        "fit": room(together, parameters, kv) or 0,
        "step_s": decode(together, parameters, batch, kv).seconds,
        "cards": cards,
        "dollars_per_h": cards * dollars_per_card_h,
        "fit_int4": fit_int4,
        "cards_int4": ceil(users / fit_int4),
    }


def naive_tokens(prompt: int = 4096, output: int = 256) -> Values:
    """Sum the tokens of every pass: the pass that makes a token does not have it yet."""
    found = figures("cache", prompt=prompt, output=output)
    return {"first": found["first_pass"], "last": found["last_pass"], "computed": found["naive_tokens"]}


def naive_overhead(prompt: int = 4096, output: int = 256) -> Values:
    """Divide the tokens computed without a cache by the tokens computed with one."""
    found = figures("cache", prompt=prompt, output=output)
    saved = int(found["tokens_saved"])
    return {"per_token": found["naive_tokens"] / output, "cached": found["cached_tokens"], "saved": saved}


def naive_order(tokens: int = 4096) -> Values:
    """Count query-key pairs of causal attention over a whole output, and over one twice as long."""

    def naive(length: int) -> int:
        return sum(visible_keys(pass_length, pass_length, None)[0] for pass_length in range(1, length + 1))

    def cached(length: int) -> int:
        return visible_keys(length, length, None)[0]

    def step(length: int) -> int:
        return visible_keys(1, length, None)[0]

    ratio = {"naive": naive, "cached": cached, "step": step}
    return {name: pairs(2 * tokens) / pairs(tokens) for name, pairs in ratio.items()}


def ops_at_step(step: int = 500) -> Values:
    """Count the first token, and one more for each step."""
    return {"computed": step + 1, "written": 1, "read": step}


def decode_steps(tokens: int = 500, per_round: float = 3.36) -> Values:
    """Count one step for each token after the first."""
    decode = tokens - 1
    return {"prefill": 1, "decode": decode, "rounds": ceil(decode / per_round)}


def e2e_vs_ttft(tokens: int = 50, times_low: float = 5, times_high: float = 10) -> Values:
    """Take the ratio from times = 1 + (tokens - 1) × TPOT ÷ TTFT."""
    steps = tokens - 1
    return {"steps": steps, "low": (times_low - 1) / steps, "high": (times_high - 1) / steps}


def short_prompt(parameters: float = 13e9, tokens: int = 12, card: str = H100) -> Values:
    """Compare the FLOPs of the prompt with the bytes of the weights."""
    compute_s = 2 * parameters * tokens / peak(card)
    step = limit(card, flops=2 * parameters * tokens, weight_bytes=2 * parameters)
    decode = limit(card, flops=2 * parameters, weight_bytes=2 * parameters)
    break_even = ceil(limit(card, weight_bytes=2 * parameters).seconds * peak(card) / (2 * parameters))
    return {"break_even": break_even, "step_s": step.seconds, "decode_s": decode.seconds, "compute_s": compute_s}


def prefix(prefix_tokens: int = 1000, short: int = 10, long: int = 100) -> Values:
    """Divide the tokens of the prompt by those that no earlier request had."""
    most, least = (figures("prefix", shared=prefix_tokens, question=each)["ratio"] for each in (short, long))
    return {"most": most, "least": least}


def reasoning(short: float = 1e4, long: float = 1e6, weight_bytes: float = 140e9, card: str = H100) -> Values:
    """Multiply the floor of a step, and the KV bytes of a token, by the tokens."""
    step_s, kv = limit(card, weight_bytes=weight_bytes).seconds, kv_bytes(1, 80, 8, 128)
    return {"short_s": short * step_s, "long_s": long * step_s, "short_bytes": short * kv, "long_bytes": long * kv}
