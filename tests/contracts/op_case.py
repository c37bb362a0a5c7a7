"""What a case of the op contract is; `op_cases_<area>.py` declares CASES, and test_opset.py finds them."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Case:
    """One call of an op: shapes with the symbols T and R, and upper bounds of the inputs that are integers."""

    attrs: object
    inputs: list
    weights: list = field(default_factory=list)
    below: dict = field(default_factory=dict)
    states: list = field(default_factory=list)  # of the program, for ops that keep something
    float32: set = field(default_factory=set)  # inputs that stay float32 whatever the activations are
    moved: Callable | None = None  # bytes moved, from (inputs, outputs, weights); None: each of them once


def nbytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)
