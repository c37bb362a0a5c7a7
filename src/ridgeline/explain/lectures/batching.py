"""Batches: what more sequences in a step gain, and where that ends."""

from ridgeline.cost.roofline import bytes_per_weight
from ridgeline.explain.explorers import figures
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import H100, bandwidth, decode, kv_bytes, limit, lowered, memory, room
from ridgeline.explain.pricing import price

PARAMETERS_13B = 13e9  # as the texts have it; 40 layers of 40 heads of 128 entries


def table_13b(batch: int = 1, parameters: float = PARAMETERS_13B, context: int = 1024, card: str = H100) -> Values:
    """Divide the bytes of weights and KV cache by the bandwidth, and the memory beside the weights by a sequence."""
    found = figures("fit", parameters=parameters, batch=batch, context=context, card=card)
    return {
        "kv_bytes": found["cache"],
        "all_bytes": found["all"],
        "step_s": found["tpot"],
        "tokens_per_s": found["throughput"],
        "free_bytes": memory(card) - found["all"],
        "largest": found["most"],
        "cards": found["all"] / memory(card),
    }


def table_gain(some: int = 64, many: int = 256, card: str = H100) -> Values:
    """Divide the tokens per second of two rows of the table."""
    one, at_some, at_many = (table_13b(batch, card=card)["tokens_per_s"] for batch in (1, some, many))
    return {"first": at_some / one, "then": at_many / at_some}


def table_why(context: int = 1024, card: str = H100) -> Values:
    """Divide the bandwidth by the KV bytes of a sequence: the limit of large batches."""
    most = figures("batching", context=context, card=card)["limit"]
    return {"most_per_s": most, "sequence_bytes": bandwidth(card) / most}


def table_config(model: str = "llama-2-13b", context: int = 1024, card: str = H100) -> Values:
    """Sum the op table's costs of the model's program, weights and KV reads."""
    costs = [price(model, card=card, batch=batch, context=context).cost for batch in (1, 64, 256)]
    one, some, many = (
        limit(card, flops=cost.flops, weight_bytes=cost.weight_bytes, kv_bytes=cost.kv_read_bytes).seconds
        for cost in costs
    )
    parameters, read = lowered(model).num_parameters, costs[0].weight_bytes
    return {"parameters": parameters, "read_bytes": read, "one_s": one, "some_s": some, "many_s": many}


def batch_cost(
    batch: int = 32, context: int = 1024, parameters: float = PARAMETERS_13B, claimed: float = 0.85
) -> Values:
    """Compare the bytes of a token of a batch with those of a token alone."""
    token, weight_bytes = kv_bytes(1, 40, 40, 128), 2 * parameters

    def share(kv: float) -> float:
        return (weight_bytes + batch * kv) / batch / (weight_bytes + kv)

    left = batch * (1 - claimed)  # (W + B·kv) = left · (W + kv)
    return {
        "saved": 1 - share(context * token),
        "most": 1 - 1 / batch,
        "context_85": weight_bytes * (left - 1) / (batch - left) / token,
    }


def static_util(short: int = 50, long: int = 500) -> Values:
    """Divide the tokens of both outputs by the slots that they hold until the longer one ends."""
    return {"busy": (short + long) / (2 * max(short, long))}


def two_h100(parameters: float = 70e9, context: int = 1024, cards: int = 2, card: str = H100) -> Values:
    """Fill the memory beside the weights with sequences, and take the larger of arithmetic and bytes."""
    values: dict[str, float] = {}
    together, kv = f"{card}:{cards}", kv_bytes(context, 80, 8, 128)
    for name, each in (("bf16", 2.0), ("int8", 1.0), ("int4", bytes_per_weight("int4", 1, 128))):
        batch = room(together, parameters, kv, weight=each) or 0
        step_s = decode(together, parameters, batch, kv, weight=each).seconds
        values |= {f"{name}_batch": batch, f"{name}_per_s": batch / step_s}
    return values


def tp_pp(stages: int = 4, micro: int = 4, layers: int = 80, hidden: int = 8192) -> Values:
    """Count the all-reduces of a step, two a layer, and the share of a pipeline's time in which it is full."""
    found = figures("pipeline", stages=stages, micro_batches=micro, layers=layers, hidden=hidden)
    return {"fill": found["full"], "reduces": found["all_reduces"], "reduce_bytes": found["all_reduce_bytes"]}


def diagnosis(
    parameters: float = 13e9, context: int = 1024, batch: int = 32, acceptance: float = 0.8, card: str = H100
) -> Values:
    """Divide the tokens per second of each change by those before it."""
    token = kv_bytes(context, 40, 40, 128)

    def per_s(count: int, each: float, kv: float) -> float:
        return count / decode(card, parameters, count, kv, weight=each).seconds

    int4 = bytes_per_weight("int4", 1, 128)
    small = kv_bytes(context, 40, 40, 128, element_bytes=1)
    kv_batch = room(card, parameters, small) or 0
    base, batched, halved = per_s(1, 2, token), per_s(batch, 2, token), per_s(kv_batch, 2, small)
    return {
        "batching": batched / base,
        "kv_batch": kv_batch,
        "kv": halved / batched,
        "int4": per_s(kv_batch, int4, small) / halved,
        "draft": figures("speculation", acceptance=acceptance)["speedup"],
    }
