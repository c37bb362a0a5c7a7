"""Predict the seconds of a step: pieces priced by the op table, limits by a roofline, efficiencies of this machine.

    step = Σ pieces predicted + rest,   rest = a + b · sequences

Over and over, for a simulator: what depends on the numbers of tokens and rows alone is predicted once. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.cost.efficiency import Calibration, Efficiency, OpTiming, Rest, key_of
from ridgeline.cost.hardware import InputKind
from ridgeline.cost.prices import GroupPrice, price_groups
from ridgeline.cost.roofline import Ceilings, Roofline
from ridgeline.program.op import Program
from ridgeline.program.passes.fuse import Group, fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost

# Where nothing was fitted: what the kernels reach on the CPUs of docs/performance.md, and Python around them.
PRIOR = Efficiency(compute_share=0.6, memory_share=0.8, power=2.0, overhead_s=2e-6)
PRIOR_REST = Rest(step_s=60e-6, sequence_s=18e-6)


@dataclass(frozen=True, slots=True)
class _Priced:
    """Equal pieces: the key of their efficiency, what they multiply, and what they cost."""

    key: str
    inputs: InputKind
    price: GroupPrice
    depends_on_spans: bool


class StepTime:
    """Predicts steps of `program`, computed as `pieces` by `num_threads` threads below `ceilings`.

    With `is_limit` the result is the least time, with nothing around the ops; otherwise `calibration` has the
    efficiencies, and PRIOR those that it lacks. Keys that it lacked are in `unfitted`.
    """

    def __init__(
        self,
        program: Program,
        pieces: Sequence[OpTiming],
        ceilings: Ceilings,
        num_threads: int,
        calibration: Calibration | None = None,
        *,
        is_limit: bool = False,
    ) -> None:
        self._ceilings, self._num_threads = ceilings, num_threads
        self._calibration, self._is_limit = calibration, is_limit
        self.unfitted: set[str] = set()
        self._pieces = _priced(program, pieces)
        self._constant_s = sum(self._seconds(key_of(p), 0.0, 0.0) for p in pieces if not p.ops)
        self._by_size: dict[tuple[int, int], tuple[float, float, float]] = {}
        fitted = calibration.rest if calibration is not None else None
        self.rest = Rest(0.0, 0.0) if is_limit else fitted or PRIOR_REST
        self.is_rest_fitted = fitted is not None

    def seconds(self, load: Load) -> float:
        """Return the predicted seconds of a step."""
        size = load.num_tokens, load.num_rows
        if (known := self._by_size.get(size)) is None:
            known = self._by_size[size] = self._of_size(load)
        memory_bytes, cached_s, streamed_s = known
        varying = [(piece, piece.price.cost(load)) for piece in self._pieces if piece.depends_on_spans]
        memory_bytes += sum(piece.price.count * _memory_bytes(cost) for piece, cost in varying)
        roofline = Roofline(self._ceilings, self._num_threads, memory_bytes)
        total_s = cached_s if memory_bytes <= self._ceilings.cache_bytes else streamed_s
        for piece, cost in varying:
            total_s += piece.price.count * self._of_piece(piece, cost, roofline)
        return total_s + self._constant_s + self.rest.of(len(load.spans))

    def bounds(self, load: Load) -> tuple[dict[str, float], OpCost]:
        """Return the least seconds of a step by what bounds them, and all that it costs."""
        costs = [(piece, piece.price.cost(load)) for piece in self._pieces]
        total = sum((cost * piece.price.count for piece, cost in costs), OpCost())
        roofline = Roofline(self._ceilings, self._num_threads, _memory_bytes(total))
        found: dict[str, float] = {}
        for piece, cost in costs:
            limit = roofline.predict(cost, piece.inputs)
            found[limit.bound] = found.get(limit.bound, 0.0) + piece.price.count * limit.seconds
        return found, total

    def ceiling_bytes_per_s(self) -> dict[str, float]:
        """Return what can be read in a second, at most, from memory and from the cache."""
        ceilings, num_threads = self._ceilings, self._num_threads
        return {"memory": ceilings.stream(num_threads), "cache": ceilings.cached(num_threads)}

    def ceiling_flops_per_s(self) -> dict[str, float]:
        """Return the arithmetic that is possible in a second, by the type of inputs that the program has."""
        kinds: list[InputKind] = sorted({piece.inputs for piece in self._pieces})
        return {kind: peak for kind in kinds if (peak := self._ceilings.peak(kind, self._num_threads)) is not None}

    def _of_size(self, load: Load) -> tuple[float, float, float]:
        """Return bytes from memory, and seconds with and without them in the cache, of what no span decides."""
        fixed = [(piece, piece.price.cost(load)) for piece in self._pieces if not piece.depends_on_spans]
        cached, streamed = (Roofline(self._ceilings, self._num_threads, num_bytes) for num_bytes in (0, float("inf")))
        return (
            sum(piece.price.count * _memory_bytes(cost) for piece, cost in fixed),
            sum(piece.price.count * self._of_piece(piece, cost, cached) for piece, cost in fixed),
            sum(piece.price.count * self._of_piece(piece, cost, streamed) for piece, cost in fixed),
        )

    def _of_piece(self, piece: _Priced, cost: OpCost, roofline: Roofline) -> float:
        limit = roofline.predict(cost, piece.inputs)
        return limit.seconds if self._is_limit else self._seconds(piece.key, limit.compute_s, limit.moving_s)

    def _seconds(self, key: str, compute_s: float, moving_s: float) -> float:
        if self._is_limit:
            return 0.0
        found = self._calibration.predict(key, compute_s, moving_s) if self._calibration is not None else None
        if found is None:
            self.unfitted.add(key)
            found = PRIOR.predict(compute_s, moving_s)
        assert found is not None, "the prior knows all limits"
        return found


def pieces_of(program: Program, element: ElementBytes, inputs: InputKind) -> Sequence[OpTiming]:
    """Return the program as an engine nobody measured would compute it: its groups, with operands of one size."""
    return [
        OpTiming(group.label, group.kind, tuple(op.label for op in group.ops), 0.0, element, inputs)
        for group in fuse(program)
    ]


def _memory_bytes(cost: OpCost) -> float:
    return cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes


def _priced(program: Program, pieces: Sequence[OpTiming]) -> list[_Priced]:
    ops = {op.label: op for op in program.ops}
    alike: dict[tuple[str, InputKind, ElementBytes], list[Group]] = {}
    for piece in pieces:
        if piece.ops:
            group = Group(piece.kind, piece.label, tuple(ops[label] for label in piece.ops))
            alike.setdefault((key_of(piece), piece.inputs, piece.element), []).append(group)
    prices = ((*kind, price) for kind, groups in alike.items() for price in price_groups(program, groups, kind[2]))
    return [_Priced(key, inputs, price, _depends_on_spans(price)) for key, inputs, _, price in prices]


def _depends_on_spans(price: GroupPrice) -> bool:
    """Compare loads of as many tokens and rows, in other sequences of other lengths."""
    return price.cost(Load(((3, 5),), 1)) != price.cost(Load(((1, 900), (2, 70_000)), 1))
