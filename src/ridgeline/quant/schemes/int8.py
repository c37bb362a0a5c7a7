"""8 bits, symmetric, one float32 scale per output: w ~ (v - 128) * s, with v from 1 to 255."""

import torch

from ridgeline.core.errors import ConfigError
from ridgeline.quant.scheme import Quantized, require_finite, row_chunks

LARGEST = 127
ZERO = 128
SCALE_BYTES = 4


def quantize(weight_NK: torch.Tensor, group_size: int, zero_points: bool) -> Quantized:
    """The largest magnitude of a row becomes 127 steps. `group_size` is not used: a row is one group."""
    if zero_points:
        raise ConfigError("int8 weights have no zero points: leave them out, or quantize to int4")
    num_outputs, num_inputs = weight_NK.shape
    values = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
    scales = torch.zeros(num_outputs, 1)
    for rows, w in row_chunks(weight_NK):
        low, high = w.amin(dim=1, keepdim=True), w.amax(dim=1, keepdim=True)
        scale = torch.maximum(high, -low).div_(LARGEST)
        require_finite(scale, rows.start)
        # Below the normal floats a scale has no precision left, and kernels take it for zero: so is the row.
        scale[scale < torch.finfo(torch.float32).tiny] = 0
        steps = w / torch.where(scale > 0, scale, torch.inf)
        values[rows] = steps.round_().add_(ZERO).to(torch.int16).to(torch.uint8)
        scales[rows] = scale
    return Quantized(values, scales, None, num_inputs)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """float32 [N, K]."""
    return (quantized.values.float() - ZERO) * quantized.scales


def stored_bytes(shape: tuple[int, int], group_size: int, zero_points: bool) -> int:
    """A byte per weight and a scale per output."""
    num_outputs, num_inputs = shape
    return num_outputs * (num_inputs + SCALE_BYTES)
