"""Price fewer bits: bytes of weights, what they gain at most, and what they lose. Mixtures of experts."""

from ridgeline.cost.roofline import WeightKind, bytes_per_weight
from ridgeline.explain.explorers import figures
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import lowered
from ridgeline.explain.pricing import price


def _int4(group: int = 128) -> float:
    return bytes_per_weight("int4", 1, group)


def formats_70b(model: str = "llama-3-70b", group: int = 128, consumer_bytes: float = 32e9) -> Values:
    """Multiply the parameters by the bytes of a weight with its scale."""
    parameters = lowered(model).num_parameters
    kinds: tuple[WeightKind, ...] = ("f32", "bf16", "int8")
    sizes = {f"{kind}_bytes": parameters * bytes_per_weight(kind, 8192) for kind in kinds}
    return {**sizes, "int4_bytes": parameters * _int4(group), "consumer_bytes": consumer_bytes}


def latency_formats(inputs: int = 8192, group: int = 128, small: int = 32) -> Values:
    """Divide the bytes of a weight in bf16 by those of each dtype with its scale."""
    bf16, int8 = bytes_per_weight("bf16", inputs), bytes_per_weight("int8", inputs)
    return {"fp8": bf16 / 1, "int8": bf16 / int8, "int4": bf16 / _int4(group), "int4_small": bf16 / _int4(small)}


def awq(group: int = 128) -> Values:
    """Divide 16 bits by the bits of a weight with and without a 16-bit scale per group."""
    return {"three": 16 / (3 + 16 / group), "three_bare": 16 / 3, "four": bytes_per_weight("bf16", 1) / _int4(group)}


def outlier(largest: float = 1000.0) -> Values:
    """Round normal values and the outlier with one scale, and without the outlier; root mean square of the errors."""
    found = figures("dtypes", outlier=largest)
    names = {"step": "outlier_step", "zeroed": "zeroed", "error": "outlier_error", "split": "split_error"}
    return {name: found[figure] for name, figure in names.items()}


def bf16_small(small: float = 4e9, large: float = 8e9) -> Values:
    """Multiply the parameters by the bytes of a weight."""
    return {"small_bytes": 2 * small, "large_bytes": large * _int4(), "flops": large / small}


def moe(model: str = "mixtral-8x7b", some: int = 8, many: int = 32) -> Values:
    """Sum the op table's costs of the model's program: E·(1 - (1 - k/E)^T) experts are read."""
    values: dict[str, float] = {}
    for name, batch in (("one", 1), ("some", some), ("many", many)):
        values[name] = figures("moe", batch=batch)["read"]
        values[f"{name}_bytes"] = price(model, batch=batch).cost.weight_bytes
    return {**values, "all_bytes": 2 * lowered(model).num_parameters}
