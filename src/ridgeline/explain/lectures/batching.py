"""Batches: what more sequences in a step gain, and where that ends."""

from ridgeline.cost.roofline import bytes_per_weight
from ridgeline.cost.speculation import speedup
from ridgeline.explain.lectures.row import Values, row
from ridgeline.explain.limits import H100, bandwidth, decode_cost, kv_bytes, limit, lowered, memory

WEIGHTS_13B = 26e9  # as the texts have it: 13e9 parameters of 2 bytes
SEQUENCE_BYTES = 838_860_800.0  # 40 layers of 40 heads of 128 entries, 1,024 tokens


def _table(batch: int, weight_bytes: float, sequence_bytes: float, card: str) -> Values:
    step_s = limit(card, flops=batch * weight_bytes, weight_bytes=weight_bytes, kv_bytes=batch * sequence_bytes).seconds
    return {
        "kv_bytes": batch * sequence_bytes,
        "all_bytes": weight_bytes + batch * sequence_bytes,
        "step_s": step_s,
        "tokens_per_s": batch / step_s,
    }


@row(
    "table-13b-1",
    "D4",
    "0.84 GB · 26.84 GB · 8.0 ms · 125 tokens/s",
    "=",
    "{kv_bytes:2GB} · {all_bytes:2GB} · {step_s:2ms} · {tokens_per_s:1} tokens/s",
    "datasheet",
    kv_bytes=0.84e9,
    all_bytes=26.84e9,
    step_s=8.0e-3,
    tokens_per_s=125,
)
def table_13b_1(
    batch: int = 1, weight_bytes: float = WEIGHTS_13B, sequence_bytes: float = SEQUENCE_BYTES, card: str = H100
) -> Values:
    """Divide the bytes of weights and KV cache by the bandwidth."""
    return _table(batch, weight_bytes, sequence_bytes, card)


@row(
    "table-13b-64",
    "D4",
    "53.6 GB · 79.6 GB · 23.8 ms · 2,690 tokens/s",
    "≈",
    "{kv_bytes:2GB} · {all_bytes:2GB} · {step_s:2ms} · {tokens_per_s:1} tokens/s; {free_bytes:1GB} are left before any "
    "workspace: {largest:0} is the largest batch that fits",
    "datasheet",
    kv_bytes=53.6e9,
    all_bytes=79.6e9,
    step_s=23.8e-3,
    tokens_per_s=2690,
)
def table_13b_64(
    batch: int = 64, weight_bytes: float = WEIGHTS_13B, sequence_bytes: float = SEQUENCE_BYTES, card: str = H100
) -> Values:
    """Divide the bytes of weights and KV cache by the bandwidth, and the memory beside the weights by a sequence."""
    values = _table(batch, weight_bytes, sequence_bytes, card)
    free = memory(card) - weight_bytes
    return {**values, "free_bytes": free - values["kv_bytes"], "largest": int(free / sequence_bytes)}


@row(
    "table-13b-256",
    "D4",
    "214 GB · 240 GB · 71.6 ms · 3,575 tokens/s, on one card",
    "✗",
    "{kv_bytes:1GB} · {all_bytes:1GB} · {step_s:2ms} · {tokens_per_s:0} tokens/s, if it fitted: it is {cards:2} times "
    "the "
    "memory of a card",
    "datasheet",
    cards=1,
)
def table_13b_256(
    batch: int = 256, weight_bytes: float = WEIGHTS_13B, sequence_bytes: float = SEQUENCE_BYTES, card: str = H100
) -> Values:
    """Divide the bytes of weights and KV cache by the bandwidth, and by the memory."""
    values = _table(batch, weight_bytes, sequence_bytes, card)
    return {**values, "cards": values["all_bytes"] / memory(card)}


@row(
    "table-gain",
    "D4",
    "21 times from 1 to 64, then 1.3 times to 256",
    "≈",
    "{first:1x}, then {then:2x}",
    "datasheet",
    first=21,
    then=1.3,
)
def table_gain(some: int = 64, many: int = 256, card: str = H100) -> Values:
    """Divide the tokens per second of two rows of the table."""
    one, at_some, at_many = (
        _table(batch, WEIGHTS_13B, SEQUENCE_BYTES, card)["tokens_per_s"] for batch in (1, some, many)
    )
    return {"first": at_some / one, "then": at_many / at_some}


@row(
    "table-why",
    "D4",
    "the gain ends because bandwidth is saturating",
    "✗",
    "it was saturated at batch 1; every sequence brings {sequence_bytes:2GB} of KV reads, so no batch passes "
    "{most_per_s:0} tokens/s",
    "datasheet",
)
def table_why(sequence_bytes: float = SEQUENCE_BYTES, card: str = H100) -> Values:
    """Divide the bandwidth by the KV bytes of a sequence: the limit of large batches."""
    return {"sequence_bytes": sequence_bytes, "most_per_s": bandwidth(card) / sequence_bytes}


@row(
    "table-config",
    "D4",
    "(the same table from Llama-2-13B's config.json)",
    "+",
    "{parameters:3G} parameters, of which a step reads {read_bytes:2GB}, one row of the embedding: {one_s:2ms} · "
    "{some_s:2ms} · "
    "{many_s:2ms}",
    "datasheet",
)
def table_config(model: str = "llama-2-13b", context: int = 1024, card: str = H100) -> Values:
    """Sum the op table's costs of the model's program, weights and KV reads."""
    costs = [decode_cost(model, batch, context) for batch in (1, 64, 256)]
    one, some, many = (
        limit(card, flops=cost.flops, weight_bytes=cost.weight_bytes, kv_bytes=cost.kv_read_bytes).seconds
        for cost in costs
    )
    read = costs[0].weight_bytes
    return {
        "parameters": lowered(model).num_parameters,
        "read_bytes": read,
        "one_s": one,
        "some_s": some,
        "many_s": many,
    }


@row(
    "batch-cost",
    "B",
    "32 concurrent requests cost 85 % less a token",
    "✗",
    "{saved:1%} less at {context:0} tokens (never more than {most:1%}); 85 % at {context_85:0} tokens",
    saved=0.85,
)
def batch_cost(
    batch: int = 32, context: int = 1024, weight_bytes: float = WEIGHTS_13B, claimed: float = 0.85
) -> Values:
    """Compare the bytes of a token of a batch with those of a token alone."""
    token = kv_bytes(1, 40, 40, 128)

    def share(kv: float) -> float:
        return (weight_bytes + batch * kv) / batch / (weight_bytes + kv)

    left = batch * (1 - claimed)  # (W + B·kv) = left · (W + kv)
    return {
        "saved": 1 - share(context * token),
        "most": 1 - 1 / batch,
        "context": context,
        "context_85": weight_bytes * (left - 1) / (batch - left) / token,
    }


@row(
    "static-util",
    "B D4",
    "(how idle a static batch is with outputs of 50 and 500 tokens)",
    "+",
    "{busy:0%} of its slots are busy",
)
def static_util(short: int = 50, long: int = 500) -> Values:
    """Divide the tokens of both outputs by the slots that they hold until the longer one ends."""
    return {"busy": (short + long) / (2 * max(short, long))}


@row(
    "two-h100",
    "D9",
    "(which techniques for 70B on two cards, if only throughput counts?)",
    "+",
    "those that buy batch: bf16 {bf16_batch:0} sequences of 1,024 tokens and {bf16_per_s:0} tokens/s; int8 "
    "{int8_batch:0}, "
    "{int8_per_s:0}; int4 {int4_batch:0}, {int4_per_s:0} and compute-bound",
    "datasheet",
)
def two_h100(parameters: float = 70e9, context: int = 1024, cards: int = 2, card: str = H100) -> Values:
    """Fill the memory beside the weights with sequences, and take the larger of arithmetic and bytes."""
    values: dict[str, float] = {}
    together, kv = f"{card}:{cards}", kv_bytes(context, 80, 8, 128)
    for name, each in (("bf16", 2.0), ("int8", 1.0), ("int4", bytes_per_weight("int4", 1, 128))):
        batch = int((memory(together) - parameters * each) / kv)
        step = limit(together, flops=2 * parameters * batch, weight_bytes=parameters * each, kv_bytes=batch * kv)
        values |= {f"{name}_batch": batch, f"{name}_per_s": batch / step.seconds}
    return values


@row(
    "tp-pp",
    "A",
    "pipeline parallelism adds latency, tensor parallelism none",
    "lit",
    "a token passes all {stages:0} stages either way; with {micro:0} micro-batches a pipeline is {fill:0%} full; "
    "tensor "
    "parallelism sends {reduces:0} all-reduces of {reduce_bytes:0B} a token, each at the latency of the link: unknown "
    "here, "
    "not measured",
)
def tp_pp(stages: int = 4, micro: int = 4, layers: int = 80, hidden: int = 8192) -> Values:
    """Count the all-reduces of a step, two a layer, and the share of a pipeline's time in which it is full."""
    return {
        "stages": stages,
        "micro": micro,
        "fill": micro / (micro + stages - 1),
        "reduces": 2 * layers,
        "reduce_bytes": 2 * hidden,
    }


@row(
    "diagnosis",
    "A-C",
    "look at batching, then KV memory, then precision, then speculation",
    "=",
    "for 13B at {context:0} tokens, limits: batch 1 to {batch:0} {batching:1x}; the memory of int8 KV then holds "
    "{kv_batch:0}, "
    "{kv:2x}; int4 weights too {int4:2x}; speculation at batch 1 {draft:2x}, at {batch:0} it needs a batch below the "
    "ridge",
    "datasheet",
)
def diagnosis(
    parameters: float = 13e9, context: int = 1024, batch: int = 32, acceptance: float = 0.8, card: str = H100
) -> Values:
    """Divide the tokens per second of each change by those before it."""
    token = kv_bytes(context, 40, 40, 128)

    def per_s(count: int, each: float, kv: float) -> float:
        return (
            count
            / limit(card, flops=2 * parameters * count, weight_bytes=parameters * each, kv_bytes=count * kv).seconds
        )

    int4 = bytes_per_weight("int4", 1, 128)
    small = kv_bytes(context, 40, 40, 128, element_bytes=1)
    kv_batch = int((memory(card) - 2 * parameters) / small)
    base, batched, halved = per_s(1, 2, token), per_s(batch, 2, token), per_s(kv_batch, 2, small)
    return {
        "context": context,
        "batch": batch,
        "batching": batched / base,
        "kv_batch": kv_batch,
        "kv": halved / batched,
        "int4": per_s(kv_batch, int4, small) / halved,
        "draft": speedup((acceptance,) * 4, 0.11),
    }
