"""Predict the seconds of a step: pieces priced by the op table, limits by a roofline, efficiencies of this machine.

    step = k · Σ pieces predicted + rest
    rest = a + b · sequences + (c + d · sequences) / 2^age + e · sequences that came + f, where sequences are gone
         + g, where the next one is planned anew meanwhile + h · tokens of the step before it was laid out anew / 2^age

`age` is how many steps ago one was laid out anew; k goes by the tokens of the step.

Over and over, for a simulator: what depends on the numbers of tokens and rows alone is predicted once. No torch.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ridgeline.cost.efficiency import Behind, Calibration, Efficiency, OpTiming, Rest, TimedStep, fit_rest, key_of
from ridgeline.cost.hardware import InputKind
from ridgeline.cost.prices import GroupPrice, forms_of, price_groups
from ridgeline.cost.roofline import Ceilings, Roofline, sampling_cost
from ridgeline.program.op import Program
from ridgeline.program.passes.fuse import Group, fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost

# Where nothing was fitted: what the kernels reach on the CPUs of docs/performance.md, and Python around them.
PRIOR = Efficiency(compute_share=0.6, memory_share=0.8, power=2.0, overhead_s=2e-6)
PRIOR_REST = Rest(step_s=60e-6, sequence_s=18e-6)


@dataclass(frozen=True, slots=True)
class _Priced:
    """Equal pieces: their kind, the key of their efficiency, what they multiply, and what they cost."""

    kind: str
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
        self._sampling, self._program = [key_of(p) for p in pieces if not (p.ops or is_limit)], program
        self._bytes: dict[tuple[int, int], float] = {}
        self._fixed_s: dict[tuple[int, int, float], float] = {}
        fitted = calibration and calibration.rest_of(pieces)
        self.rest = Rest(0.0, 0.0) if is_limit else fitted or PRIOR_REST
        self.is_rest_fitted = fitted is not None
        self._mean = 1.0 if calibration is None or is_limit else calibration.mean
        self.pace = 1.0, 1.0  # of arithmetic, and of what moves bytes

    def mean_seconds(self, load: Load, behind: Behind) -> float:
        """Return the predicted seconds of such a step at the mean, for sums of many: half of them are shorter."""
        return self._mean * self.seconds(load, behind)

    def seconds(self, load: Load, behind: Behind | None = None) -> float:
        """Return the predicted seconds of a step; None: what computes prompts is laid out anew, all else is not."""
        if behind is None:
            came = sum(num_tokens == end for num_tokens, end in load.spans)
            behind = Behind(0 if load.num_tokens > len(load.spans) else math.inf, came=came)
        return self.rest.of(self._step(load, behind))

    def fitted(self, steps: Iterable[tuple[Load, Behind, float]], *, with_ops: bool) -> "StepTime":
        """Return the same with what is around ops, and `with_ops` what these take among others, as in these steps."""
        found = self.with_rest(fit_rest([self._step(*step) for step in steps], self.rest, with_ops=with_ops))
        found.is_rest_fitted = True
        return found

    def uncalibrated(self) -> "StepTime":
        """Return the same with efficiencies of nothing but the prior."""
        found = copy.copy(self)
        found._calibration, found._fixed_s, found.unfitted = None, {}, set()
        return found

    def with_rest(self, rest: Rest) -> "StepTime":
        """Return the same with something else around ops."""
        found = copy.copy(self)
        found.rest = rest
        return found

    def with_pace(self, compute: float, moving: float) -> "StepTime":
        """Return the same where arithmetic, and what moves bytes, take so many times as long."""
        found = copy.copy(self)
        found.pace, found._fixed_s = (compute, moving), {}
        return found

    def _step(self, load: Load, behind: Behind, seconds: float = 0.0) -> TimedStep:
        return TimedStep(self._ops_s(load), load.num_tokens, len(load.spans), behind, seconds)

    def _ops_s(self, load: Load) -> float:
        """Return what all pieces take when nothing is around them."""
        size = load.num_tokens, load.num_rows
        if size not in self._bytes:
            self._bytes[size] = _memory_bytes(self._costs(load, varying=False))
        varying = self._costs(load, varying=True)
        memory_bytes = self._bytes[size] + _memory_bytes(varying)
        roofline = Roofline(self._ceilings, self._num_threads, memory_bytes)
        if (fixed_s := self._fixed_s.get((*size, roofline.read_per_s))) is None:
            fixed_s = self._of_pieces(self._costs(load, varying=False), roofline, load)
            sampling = 0.0, roofline.predict(sampling_cost(self._program, load), "f32").moving_s, load.num_tokens
            fixed_s += sum(self._seconds(key + roofline.where, *sampling) for key in self._sampling)
            self._fixed_s[*size, roofline.read_per_s] = fixed_s
        return self._of_pieces(varying, roofline, load) + fixed_s

    def bounds(self, load: Load) -> tuple[dict[str, float], OpCost]:
        """Return the least seconds of a step by what bounds them, and all that it costs."""
        costs = [(piece, piece.price.cost(load)) for piece in self._pieces]
        total = sum((cost * piece.price.count for piece, cost in costs), OpCost())
        roofline = Roofline(self._ceilings, self._num_threads, _memory_bytes(costs))
        found: dict[str, float] = {}
        for piece, cost in costs:
            limit = roofline.predict(cost, piece.inputs)
            found[limit.bound] = found.get(limit.bound, 0.0) + piece.price.count * limit.seconds
        return found, total

    def ceilings_per_s(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes that can be read in a second, and the arithmetic by the type of the program's inputs."""
        ceilings, num_threads = self._ceilings, self._num_threads
        kinds: list[InputKind] = sorted({piece.inputs for piece in self._pieces})
        peaks: dict[str, float] = {k: peak for k in kinds if (peak := ceilings.peak(k, num_threads)) is not None}
        return {"memory": ceilings.stream(num_threads), "cache": ceilings.cached(num_threads)}, peaks

    def _costs(self, load: Load, *, varying: bool) -> list[tuple[_Priced, OpCost]]:
        """Return what one costs of the pieces that spans decide about, or of the others."""
        return [(each, each.price.cost(load)) for each in self._pieces if each.depends_on_spans is varying]

    def _of_pieces(self, costs: Sequence[tuple[_Priced, OpCost]], roofline: Roofline, load: Load) -> float:
        total_s = 0.0
        for piece, cost in costs:
            for form, part in [("", load)] if self._is_limit else forms_of(piece.kind, load):
                limit = roofline.predict(cost if part is load else piece.price.cost(part), piece.inputs)
                work = piece.key + form + roofline.where, limit.compute_s, limit.moving_s, part.num_tokens
                total_s += piece.price.count * (limit.seconds if self._is_limit else self._seconds(*work))
        return total_s

    def _seconds(self, key: str, compute_s: float, moving_s: float, num_tokens: int) -> float:
        known, (slower, later) = self._calibration, self.pace
        compute_s, moving_s = slower * compute_s, later * moving_s
        found = None if known is None else known.predict(key, compute_s, moving_s, num_tokens)
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


def _memory_bytes(costs: Sequence[tuple[_Priced, OpCost]]) -> float:
    return sum(piece.price.count * (c.weight_bytes + c.kv_read_bytes + c.kv_write_bytes) for piece, c in costs)


def _priced(program: Program, pieces: Sequence[OpTiming]) -> list[_Priced]:
    ops = {op.label: op for op in program.ops}
    alike: dict[tuple[str, InputKind, ElementBytes], list[Group]] = {}
    for piece in pieces:
        if piece.ops:
            group = Group(piece.kind, piece.label, tuple(ops[label] for label in piece.ops))
            alike.setdefault((key_of(piece), piece.inputs, piece.element), []).append(group)
    prices = ((*kind, price) for kind, groups in alike.items() for price in price_groups(program, groups, kind[2]))
    return [_Priced(price.kind, key, inputs, price, _depends_on_spans(price)) for key, inputs, _, price in prices]


def _depends_on_spans(price: GroupPrice) -> bool:
    """Compare loads of as many tokens and rows, in other sequences of other lengths."""
    return price.cost(Load(((3, 5),), 1)) != price.cost(Load(((1, 900), (2, 70_000)), 1))
