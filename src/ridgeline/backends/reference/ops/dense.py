"""Look-ups, norms, matrix products and what is done to each entry."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.backends.reference import packed
from ridgeline.backends.reference.memory import Outputs, ReferenceOp, StepMemory, Tensors
from ridgeline.backends.reference.rounding import rounded
from ridgeline.program.op import Attrs
from ridgeline.program.ops import dense
from ridgeline.spec.spec import Activation


def embed(attrs: dense.EmbedAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    ids = inputs[0]
    if attrs.vocab_size:
        ids = ids // attrs.vocab_size if attrs.of_types else ids % attrs.vocab_size
    rows = F.embedding(ids, weights[0])
    # The factor is rounded to the weights' dtype first, as the models that use one were trained.
    return (rows if attrs.scale == 1.0 else rows * torch.tensor(attrs.scale, dtype=rows.dtype),)


def add_row(attrs: dense.AddRowAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    return (inputs[0] + weights[0][attrs.row],)


def rmsnorm(attrs: dense.NormAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    x, shape = inputs[0], inputs[0].shape[-1:]
    if not weights or not attrs.unit_offset:
        return (F.rms_norm(x, shape, functools.reduce(torch.mul, weights) if weights else None, attrs.eps),)
    scale = functools.reduce(torch.mul, (1.0 + weight.float() for weight in weights))
    return (F.rms_norm(x.float(), shape, scale, attrs.eps).to(x.dtype),)


def layernorm(attrs: dense.NormAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    x, (weight, *bias) = inputs[0], weights
    if attrs.unit_offset:
        weight = 1.0 + weight
    if weight.ndim == 1:
        return (F.layer_norm(x, weight.shape, weight, bias[0] if bias else None, attrs.eps),)
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=attrs.eps) * weight.float()
    return ((normed + bias[0].float() if bias else normed).to(x.dtype),)


def linear(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    return (packed.linear(rounded(inputs[0], attrs), weights[0], weights[1] if len(weights) > 1 else None),)


def lm_head(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    return (linear(attrs, inputs, weights, memory)[0].float(),)


def of_one(compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> ReferenceOp:
    """Return the op that makes a value of its attributes and one input."""
    return lambda attrs, inputs, weights, memory: (compute(attrs, inputs[0]),)


def of_two(compute: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> ReferenceOp:
    """Return the op that makes a value of its attributes and two inputs."""
    return lambda attrs, inputs, weights, memory: (compute(attrs, inputs[0], inputs[1]),)


split_heads = of_one(lambda attrs, x: torch.unflatten(x, -1, (attrs.num_heads, -1)))
slice = of_one(lambda attrs, x: x[:, attrs.offset : attrs.offset + attrs.size])
scale = of_one(lambda attrs, x: x * attrs.factor)
add = of_two(lambda _, x, y: x + y)
activation = of_one(lambda attrs, x: ACTIVATIONS[attrs.function](x))
gated_activation = of_two(lambda attrs, gate, up: ACTIVATIONS[attrs.function](gate) * up)
concat = of_two(lambda _, x, y: torch.cat((x, y), dim=-1))
select_rows = of_two(lambda _, x, rows: x.index_select(0, rows))
softcap = of_one(lambda attrs, x: attrs.cap * torch.tanh(x / attrs.cap))


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
}
