"""Weight matrices in the layout of oneDNN's matrix product, made once where `linear` makes it on every call."""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from ridgeline.program.op import Op, Program
from ridgeline.program.ops.dense import MATRIX_OPS

ROWS = 16  # of the inputs to lay out for; measured on AVX-512, the layout for 16 is the best one from 1 to 512
MIN_ELEMENTS = 2**18  # below it, calling oneDNN directly costs more than the layout saves


def pack_matrices(program: Program, weights: Mapping[str, torch.Tensor]) -> tuple[Program, Mapping[str, torch.Tensor]]:
    """Return the same program over packed copies of its matrices, under new names.

    Small matrices stay as they are, and all do where oneDNN is not there. Packed weights have no gradients. A matrix
    that an embedding reads as well is held in both layouts.
    """
    packed: dict[str, torch.Tensor] = {}
    ops: list[Op] = []
    for op in program.ops:
        if op.kind in MATRIX_OPS and _can_pack(weights[op.weights[0]]):
            dense, *bias = op.weights
            name = f"{dense}.packed"
            if name not in packed:
                packed[name] = torch.ops.mkldnn._reorder_linear_weight(weights[dense], ROWS)
            op = replace(op, weights=(name, *bias))
        ops.append(op)
    used = {name for op in ops for name in op.weights}
    unpacked = {name: weight for name, weight in weights.items() if name in used}
    return replace(program, ops=tuple(ops)), unpacked | packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x [..., I] times weight [O, I] transposed, plus bias, for a plain or a packed weight."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.numel() < MIN_ELEMENTS or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
