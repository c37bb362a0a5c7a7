"""Weights as small integers with scales: rounded to nearest when a model is loaded, from any checkpoint.

Called by backends while they lay weights out. A scheme is a file of `schemes/`; its name is the scheme's.
"""

from collections.abc import Mapping

import torch

from ridgeline.program.op import TOKEN_IDS, Program
from ridgeline.program.ops.experts import routers
from ridgeline.quant.scheme import Quantized, Scheme, names, scheme

__all__ = ["Quantized", "Scheme", "dequantize", "dequantized_weights", "names", "quantize", "quantized_names", "scheme"]


def quantize(name: str, weight_NK: torch.Tensor, group_size: int, zero_points: bool) -> Quantized:
    """`weight_NK` in the scheme of that name; see `Scheme.quantize`."""
    return scheme(name).quantize(weight_NK, group_size, zero_points)


def dequantize(name: str, quantized: Quantized) -> torch.Tensor:
    """What the integers mean, float32 [N, K]."""
    return scheme(name).dequantize(quantized)


def quantized_names(program: Program, *, embeddings: bool) -> frozenset[str]:
    """The weights that a scheme applies to: the matrices of linear layers, latent attentions and experts.

    They are [N, K], or of experts [E, N, K]. With `embeddings` also token table and head. Routers, norms, biases and
    learned positions stay as they are.
    """
    layers = {op.weights[0] for op in program.ops if op.kind in ("linear", "latent_attention")} - routers(program)
    layers |= {name for op in program.ops if op.kind == "experts" for name in op.weights[:3]}
    heads = {op.weights[0] for op in program.ops if op.kind == "lm_head"}
    tables = {op.weights[0] for op in program.ops if op.kind == "embed" and op.inputs == (TOKEN_IDS,)}
    return frozenset(layers | heads | tables if embeddings else layers - heads - tables)


def dequantized_weights(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    name: str,
    group_size: int,
    zero_points: bool,
    *,
    embeddings: bool,
) -> dict[str, torch.Tensor]:
    """`weights` after a round trip through the scheme, in their own dtypes: what a quantized model computes with.

    Exact in float32; a narrower dtype rounds once more.
    """
    chosen = quantized_names(program, embeddings=embeddings)

    def round_trip(weight: torch.Tensor) -> torch.Tensor:
        rows_NK = weight.flatten(0, -2)
        return dequantize(name, quantize(name, rows_NK, group_size, zero_points)).to(weight.dtype).view_as(weight)

    return {key: round_trip(weight) if key in chosen else weight for key, weight in weights.items()}
