"""How long the parts of a step took: what `Executable.timed` returns beside its output. No torch."""

from dataclasses import dataclass

from ridgeline.cost.hardware import InputKind
from ridgeline.program.pricing import ElementBytes


@dataclass(frozen=True, slots=True)
class OpTiming:
    """One piece of a step as a backend runs it, and how long it took, in seconds.

    `ops` are the labels of the program's ops in it; none for what the program does not hold, such as sampling.
    `inputs` is the kind of arithmetic of its products, `element` what its operands take in memory.
    """

    label: str
    kind: str
    ops: tuple[str, ...]
    seconds: float
    element: ElementBytes
    inputs: InputKind
