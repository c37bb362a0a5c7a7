"""Price fewer bits: bytes of weights, what they gain at most, and what they lose. Mixtures of experts."""

import numpy as np

from ridgeline.cost.roofline import WeightKind, bytes_per_weight
from ridgeline.explain.lectures.row import Values, row
from ridgeline.explain.limits import decode_cost, lowered
from ridgeline.program.ops.experts import distinct_experts


def _int4(group: int = 128) -> float:
    return bytes_per_weight("int4", 1, group)


@row(
    "formats-70b",
    "B D8",
    "280, 140, 70 and 35 GB, the last on one consumer GPU",
    "✗",
    "{f32_bytes:1GB}, {bf16_bytes:1GB}, {int8_bytes:1GB} and {int4_bytes:1GB} with the scales of groups of {group:0}: "
    "more "
    "than the {consumer_bytes:0GB} of a consumer's card",
    int4_bytes=35e9,
)
def formats_70b(model: str = "llama-3-70b", group: int = 128, consumer_bytes: float = 32e9) -> Values:
    """Multiply the parameters by the bytes of a weight with its scale."""
    parameters = lowered(model).num_parameters
    kinds: tuple[WeightKind, ...] = ("f32", "bf16", "int8")
    sizes = {f"{kind}_bytes": parameters * bytes_per_weight(kind, 8192) for kind in kinds}
    return {**sizes, "int4_bytes": parameters * _int4(group), "group": group, "consumer_bytes": consumer_bytes}


@row(
    "latency-formats",
    "D8 C A",
    'fp8 1.8× · int8 1.2×, "a free 2×" · int4 3× · pruned 2×',
    "✗",
    "limits: fp8 {fp8:0x} · int8 {int8:2x} with a scale per output · int4 {int4:2x} in groups of 128, {int4_small:2x} "
    "of 32 · "
    "pruning by the bytes that go; LLM.int8()'s 1.2 is a slow-down (15 to 23 %, its paper) in a column of speed-ups",
    int8=1.2,
)
def latency_formats(inputs: int = 8192, group: int = 128, small: int = 32) -> Values:
    """Divide the bytes of a weight in bf16 by those of each dtype with its scale."""
    bf16 = bytes_per_weight("bf16", inputs)
    return {
        "fp8": bf16 / 1,
        "int8": bf16 / bytes_per_weight("int8", inputs),
        "int4": bf16 / _int4(group),
        "int4_small": bf16 / _int4(small),
    }


@row(
    "awq",
    "D8",
    "AWQ keeps 1 % of the weights, the rest in int3: 4 times smaller, 3.2 times as fast",
    "✗",
    "AWQ scales channels and keeps nothing apart; 3 bits are {three:1x} to {three_bare:1x} smaller, 4 bits {four:2x}: "
    "the figures are those of 4 bits",
    three=4,
)
def awq(group: int = 128) -> Values:
    """Divide 16 bits by the bits of a weight with and without a 16-bit scale per group."""
    return {"three": 16 / (3 + 16 / group), "three_bare": 16 / 3, "four": bytes_per_weight("bf16", 1) / _int4(group)}


@row(
    "outlier",
    "B D8",
    "one outlier of 1,000 among small values wastes precision in int8",
    "+",
    "the step becomes {step:2}, and all below {zeroed:2} is 0: an error of {error:0%} of the others, {split:1%} with "
    "the "
    "outlier split off (drawn values; activations of a model: not measured)",
)
def outlier(largest: float = 1000.0, count: int = 4095, seed: int = 0) -> Values:
    """Round normal values and the outlier with one scale, and without the outlier; root mean square of the errors."""
    others = np.random.default_rng(seed).standard_normal(count)

    def error(scale: float) -> float:
        rounded = np.round(others / scale) * scale
        return float(np.sqrt(np.mean((rounded - others) ** 2) / np.mean(others**2)))

    step = largest / 127
    own = float(np.abs(others).max()) / 127
    return {"step": step, "zeroed": step / 2, "error": error(step), "split": error(own)}


@row(
    "bf16-small",
    "D8",
    "4B in bf16 can be faster than 8B in int4",
    "✗",
    "{small_bytes:1GB} against {large_bytes:1GB} a step: 8B in int4 is faster while memory-bound, 4B in bf16 where "
    "arithmetic binds, with {flops:1x} fewer FLOPs",
)
def bf16_small(small: float = 4e9, large: float = 8e9) -> Values:
    """Multiply the parameters by the bytes of a weight."""
    return {"small_bytes": 2 * small, "large_bytes": large * _int4(), "flops": large / small}


@row(
    "moe",
    "C",
    "only the active experts are read",
    "≈",
    "by the whole batch: {one:0} of 8 for one token, {some:1} for 8, {many:3} for 32 if choices are uniform: "
    "{one_bytes:1GB}, {some_bytes:1GB}, {many_bytes:1GB} of Mixtral's {all_bytes:1GB}",
)
def moe(model: str = "mixtral-8x7b", some: int = 8, many: int = 32) -> Values:
    """Sum the op table's costs of the model's program: E·(1 - (1 - k/E)^T) experts are read."""
    values: dict[str, float] = {}
    for name, batch in (("one", 1), ("some", some), ("many", many)):
        values[name] = distinct_experts(8, 2, batch)
        values[f"{name}_bytes"] = decode_cost(model, batch, 1024).weight_bytes
    return {**values, "all_bytes": 2 * lowered(model).num_parameters}
