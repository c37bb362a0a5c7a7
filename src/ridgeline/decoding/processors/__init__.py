"""Define logits processors, and their registry: each file `some_name.py` of this folder holds one class `SomeName`.

Their order, and what each does, is in the docstring of `ridgeline.decoding`. Must not import engine or server.
"""

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow

# From this order number on, a processor may see a selection of the columns, in ascending order of token id, and must
# leave the largest logit of a row the largest; greedy rows skip it. Below it, column c is token c.
FIRST_NARROWED = 50


class Processor(Protocol):
    """Changes logits of the rows that use it and of no other. Holds no state between calls."""

    order: int
    in_step: bool  # a backend that samples tokens within the step applies it there

    def uses(self, row: SampleRow) -> bool:
        """Tell whether `apply` could change this row; `apply` is only called when some row says yes."""
        ...

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        """Return processed logits, float32 [R, V], row i of SampleRow i. May write into `logits_RV`, the sampler's."""
        ...


def load_processors() -> tuple[Processor, ...]:
    """Return one instance of every processor in this folder, in order."""
    processors: list[Processor] = []
    for module_info in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{module_info.name}")
        processors.append(getattr(module, "".join(part.title() for part in module_info.name.split("_")))())
    processors.sort(key=lambda processor: processor.order)
    return tuple(processors)
