"""Compute low-rank adapters on linear layers."""

from ridgeline.backends.reference.memory import Outputs, StepMemory, Tensors
from ridgeline.program.op import Attrs


def lora(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Add the adapters' product, computed in the dtype of the weights, as a merged weight would be."""
    x, y, adapters_T = inputs
    a, b = weights
    for adapter in adapters_T.unique().tolist():
        if adapter > 0:
            rows = (adapters_T == adapter).nonzero().squeeze(1)
            y = y.index_add(0, rows, (x[rows] @ a[adapter - 1].t()) @ b[adapter - 1])
    return (y,)
