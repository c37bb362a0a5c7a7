"""Program -> when each value is read for the last time, so that its memory can serve another one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.program.op import Op


@dataclass(frozen=True, slots=True)
class Liveness:
    """Lives of values over parts that run one after the other, each of one or more ops.

    `ends[i]` are the values that part i makes or reads and no later part does. What is retained never ends.
    """

    ends: tuple[tuple[str, ...], ...]
    last_reader: Mapping[str, int]  # by value the number of the part; that of what is retained is beyond the last part


def liveness(parts: Sequence[Sequence[Op]], *retained: str) -> Liveness:
    """Return the lives of the values of `parts`, of which the caller reads those `retained` at the end."""
    last_reader = {name: number for number, ops in enumerate(parts) for op in ops for name in op.inputs}
    last_reader |= dict.fromkeys(retained, len(parts))
    touched = [dict.fromkeys(name for op in ops for name in (*op.inputs, *op.outputs)) for ops in parts]
    ends = [tuple(x for x in names if last_reader.get(x, -1) <= number) for number, names in enumerate(touched)]
    return Liveness(tuple(ends), last_reader)
