"""Predict the time of a step by a roofline of measured hardware, op by op, beside the measured time.

An op takes at least the time of reading its bytes and at least that of its arithmetic (Williams, Waterman, Patterson:
Roofline, CACM 2009). Weights and KV entries are read as fast as so many bytes are that are read again and again: from
memory, where caches do not keep them from one step to the next. Activations come from the cache, where they were
written a moment ago, unless they do not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.cost.datasheets import Datasheet
from ridgeline.cost.efficiency import CACHED
from ridgeline.cost.hardware import Hardware, InputKind
from ridgeline.cost.prices import Pricer, step_sizes
from ridgeline.program.op import Program
from ridgeline.program.pricing import FLOAT32_BYTES, ElementBytes, Load, OpCost

WeightKind = Literal[
    "f32", "bf16", "int8", "int4", "int8_groups", "int8_minima", "int4_minima", "nf4", "fp4", "e4m3",
    "int8_super", "int8_super_minima", "int4_super_minima", "mxfp4", "nvfp4",
]  # fmt: skip
Bound = Literal["memory", "cache", "compute", "nothing"]
Piece = tuple[tuple[str, ...], ElementBytes]
"""Labels of ops that are computed as one, and what their operands take in memory."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Lower bound on the time of a cost, in seconds, and the ceiling that sets it.

    It is the longer of the arithmetic, `compute_s`, and of moving the bytes, `moving_s`.
    """

    seconds: float
    bound: Bound
    compute_s: float = 0.0
    moving_s: float = 0.0


NOT_FROM_MEMORY = 1.25  # times as fast as memory: part of it is still cached

Ceilings = Hardware | Datasheet
"""A machine does this at most, per second: measured, or as its maker says."""


class Roofline:
    """The ceilings of `num_threads` threads, for steps that read `step_bytes` of weights and KV memory in all."""

    def __init__(self, hardware: Ceilings, num_threads: int, step_bytes: float) -> None:
        self._hardware, self._num_threads = hardware, num_threads
        self.read_per_s = hardware.reread(step_bytes, num_threads)
        self._is_cached = self.read_per_s > NOT_FROM_MEMORY * hardware.stream(num_threads)
        self.where = CACHED if self._is_cached else ""  # behind the key of an efficiency: shares are of other ceilings

    def predict(self, cost: OpCost, inputs: InputKind) -> Prediction:
        """Return the bound for `cost`. Arithmetic of a kind whose peak is not known takes no time."""
        peak = self._hardware.peak(inputs, self._num_threads)
        compute_s = cost.flops / peak if peak else 0.0
        memory_bytes = cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes
        fits = cost.activation_bytes <= self._hardware.cache_bytes
        at = self._hardware.cached if fits else self._hardware.stream
        read_s, activations_s = memory_bytes / self.read_per_s, cost.activation_bytes / at(self._num_threads)
        moving_s = read_s + activations_s
        memory_s = (0.0 if self._is_cached else read_s) + (0.0 if fits else activations_s)
        bound: Bound = "memory" if memory_s >= moving_s - memory_s else "cache"
        if compute_s > moving_s:
            bound = "compute"
        elif moving_s == 0:
            bound = "nothing"
        return Prediction(max(compute_s, moving_s), bound, compute_s, moving_s)


def costs_of(program: Program, pieces: Sequence[Piece], load: Load) -> list[OpCost]:
    """Return what each piece has to compute and move for `load`: its ops as one group, or it samples."""
    ops, sizes = {op.label: op for op in program.ops}, step_sizes(load)
    pricers, plain = {element: Pricer(program, element) for _, element in pieces}, sampling_cost(program, load)
    priced = (pricers[element].together([ops[name] for name in names]) for names, element in pieces)
    return [sum((price.cost(load, sizes) for price in prices), OpCost()) if prices else plain for prices in priced]


def sampling_cost(program: Program, load: Load) -> OpCost:
    """Return what it takes to look at the logits of a step once."""
    return OpCost(activation_bytes=FLOAT32_BYTES * load.num_rows * program.vocab_size)


def bytes_per_weight(kind: WeightKind, num_inputs: int, group: int = 0, *, zero_points: bool = False) -> float:
    """Return the bytes of one entry of a matrix with its share of the scales, as in native/kernels/types.h.

    int8 has a float32 scale per output, the others a float16 scale per `group` inputs, beside which int4 may have a
    zero point of one byte and int4_minima has a float16 minimum. The super kinds have bytes for these, and float16
    numbers for 256 inputs. mxfp4 and nvfp4 have scales of a byte, nvfp4 also a float32 per output; nf4 and fp4 have
    float32 scales, e4m3 too, or one per output without groups.
    """
    match kind:
        case "f32" | "bf16":
            return 4.0 if kind == "f32" else 2.0
        case "int8":
            return 1.0 + 4.0 / num_inputs
        case "int8_groups":
            return 1.0 + 2.0 / group
        case "int4":
            return 0.5 + (3.0 if zero_points else 2.0) / group
        case "int8_minima":
            return 1.0 + 4.0 / group
        case "int4_minima" | "nf4" | "fp4":
            return 0.5 + 4.0 / group
        case "e4m3":
            return 1.0 + 4.0 / (group or num_inputs)
        case "mxfp4" | "nvfp4":
            return 0.5 + 1.0 / group + (4.0 / num_inputs if kind == "nvfp4" else 0.0)
        case "int8_super":
            return 1.0 + 1.0 / group + 2.0 / 256
        case "int8_super_minima" | "int4_super_minima":
            return (0.5 if kind == "int4_super_minima" else 1.0) + 2.0 / group + 4.0 / 256
