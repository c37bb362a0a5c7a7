"""Inputs of integer matrices as native kernels multiply them: integers with a scale for each token and group.

A program over such matrices has `RoundedInputs` around the attributes of their ops; the functions of `ops/` look there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ridgeline.core.config import InputBits
from ridgeline.program.op import Attrs, Program
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.quant import StoredFormat
from ridgeline.quant.inputs import chosen_inputs, input_group

MATRIX_KINDS = (*MATRIX_OPS, "experts")
LIMITS = {8: 127, 16: 32767}  # the largest integer of so many bits, and the least negated


@dataclass(frozen=True, slots=True)
class InputRounding:
    """`group` consecutive inputs of a token share a scale, the last group may be shorter; 0: all of them do."""

    group: int
    bits: Literal[8, 16] = 8

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return x = q * s, with q = round(x / s) and s = max |x| / limit of a group, computed in float32.

        A group whose s is below the least normal float32 is zeros; one with a NaN or an infinity is NaN.
        """
        num_inputs = x_TK.shape[-1]
        group = self.group or num_inputs
        padded = torch.nn.functional.pad(x_TK.float(), (0, -num_inputs % group))
        x_TGS = padded.unflatten(-1, (-1, group))
        most_TG1 = x_TGS.abs().amax(-1, keepdim=True)
        scale_TG1 = most_TG1 / LIMITS[self.bits]
        is_used_TG1 = scale_TG1 >= torch.finfo(torch.float32).tiny
        rounded_TGS = torch.where(is_used_TG1, (x_TGS / scale_TG1).round() * scale_TG1, 0.0)
        rounded_TGS = torch.where(most_TG1.isfinite(), rounded_TGS, torch.nan)
        return rounded_TGS.flatten(-2)[..., :num_inputs].to(x_TK.dtype)


@dataclass(frozen=True, slots=True)
class RoundedInputs(Attrs):
    """`attrs`, and for each of the op's weights how the inputs that it multiplies are rounded; None: they are not."""

    attrs: Attrs
    roundings: tuple[InputRounding | None, ...]


def roundings_of(integers: Mapping[str, StoredFormat], asked: InputBits) -> Mapping[str, InputRounding]:
    """Return how the inputs of integer matrices are rounded; 16 bits are taken for exact."""
    inputs = chosen_inputs(asked)
    if inputs == "int16":
        return {}
    return {name: InputRounding(input_group(form.group, inputs)) for name, form in integers.items()}


def with_rounded_inputs(program: Program, roundings: Mapping[str, InputRounding]) -> Program:
    """Return the program with the inputs of the matrices named in `roundings` rounded."""
    ops = list(program.ops)
    for at, op in enumerate(ops):
        if op.kind in MATRIX_KINDS and not roundings.keys().isdisjoint(op.weights):
            ops[at] = replace(op, attrs=RoundedInputs(op.attrs, tuple(map(roundings.get, op.weights))))
    return replace(program, ops=tuple(ops))


def rounded(x_TK: torch.Tensor, attrs: Attrs, weight: int = 0) -> torch.Tensor:
    """Return the inputs of an op's weight of that number as its matrix multiplies them."""
    rounding = attrs.roundings[weight] if isinstance(attrs, RoundedInputs) else None
    return x_TK if rounding is None else rounding(x_TK)
