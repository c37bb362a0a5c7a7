"""Estimate what a step needs at least, from a few numbers: a model's shape and a datasheet. The formulas are the op
table's.

FLOPs here are those of matrix products alone where texts count so; a multiply-add is two.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ridgeline.core.errors import ConfigError
from ridgeline.cost.datasheets import datasheet
from ridgeline.cost.roofline import Prediction, Roofline
from ridgeline.program.lower import lower
from ridgeline.program.op import KvState, Plain, Program
from ridgeline.program.opset import OPSET
from ridgeline.program.pricing import ElementBytes, Load, OpCost, Operands
from ridgeline.spec.families import read_spec

H100 = "h100-sxm"
MODELS: Mapping[str, Mapping[str, object]] = tomllib.loads(
    Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
)
"""The shapes that texts on inference take as examples, as their config.json files have them."""


@cache
def lowered(model: str) -> Program:
    """Return the program of one of MODELS. Raises ConfigError for another name."""
    return lower(read_spec(shape(model)))


def shape(model: str) -> Mapping[str, object]:
    """Return the config of one of MODELS. Raises ConfigError for another name."""
    if model not in MODELS:
        raise ConfigError(f"there is no shape {model[:80]!r}; there are {', '.join(MODELS)}")
    return MODELS[model]


def limit(card: str, *, flops: float = 0, weight_bytes: float = 0, kv_bytes: float = 0) -> Prediction:
    """Return the least time on a device of the datasheets, or `NAME:COUNT` of them, with inputs in bf16."""
    cost = OpCost(flops=flops, weight_bytes=weight_bytes, kv_read_bytes=kv_bytes)
    return Roofline(datasheet(card), 1, cost.num_bytes).predict(cost, "bf16")


def decode(card: str, parameters: float, batch: float, sequence_bytes: float, *, weight: float = 2) -> Prediction:
    """Return the least time of a step with a token for each of `batch` sequences of so many bytes of KV cache.

    Weights take `weight` bytes each; other sizes of a step than its sequences' tokens see `limit`.
    """
    flops, kv = 2 * parameters * batch, batch * sequence_bytes
    return limit(card, flops=flops, weight_bytes=weight * parameters, kv_bytes=kv)


def room(card: str, parameters: float, sequence_bytes: float, *, weight: float = 2) -> int | None:
    """Return how many sequences fit beside the weights, None where the owner chooses the memory."""
    free = memory(card) - weight * parameters
    return None if free == float("inf") else max(0, int(free / sequence_bytes))


def peak(card: str) -> float:
    """Return the peak in operations per second with inputs in bf16, infinite where none is known."""
    return datasheet(card).peak("bf16", 1) or float("inf")


def bandwidth(card: str) -> float:
    """Return the bytes per second from memory."""
    return datasheet(card).bytes_per_s


def memory(card: str) -> float:
    """Return the bytes of memory, infinite where the owner chooses them."""
    known = datasheet(card).memory_bytes
    return float("inf") if known is None else known


def ridge(card: str) -> float:
    """Return the FLOPs per byte at which arithmetic and memory take the same time."""
    return peak(card) / bandwidth(card)


def kv_bytes(tokens: float, layers: int, kv_heads: int, head_dim: int, element_bytes: int = 2) -> float:
    """Return the bytes of the keys and values of `tokens` tokens in all layers."""
    return tokens * layers * KvState(kv_heads, head_dim, None).bytes_per_token(element_bytes)


def linear_intensity(tokens: int, inputs: int, outputs: int) -> float:
    """Return the FLOPs per byte of a matrix product in bf16: weights, inputs and outputs cross memory once."""
    read, made, weights = ((tokens, inputs),), ((tokens, outputs),), ((outputs, inputs),)
    operands = Operands(Plain(), read, made, weights, (2,), (2,), Load.decode(tokens, 1), ElementBytes())
    cost = OPSET["linear"].cost(operands)
    return cost.flops / cost.num_bytes


def attention_intensity(pairs: int, queries: int, keys: int, sharing: int = 1) -> float:
    """Return the FLOPs per byte of `sharing` query heads that read the same keys, products alone, in bf16.

    `pairs` of a query and a key it sees, of `queries` tokens and `keys` cached ones. The head's size cancels: each pair
    is two multiply-adds an entry; queries, outputs, keys and values are two bytes an entry.
    """
    return 4 * sharing * pairs / (2 * (2 * keys + 2 * sharing * queries))
