"""Price steps of a program over and over: ops that cost the same in every step are priced once.

A rule of the op table sees shapes, bytes per element and the load, never a layer's number, so a model of many equal
layers has few distinct ops. There is no formula here: every price is that of a row of the op table. No torch.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace

from ridgeline.cost.efficiency import RECURRENCES
from ridgeline.program.op import FEATURES, LOGITS, STEP_INPUTS, Attrs, Op, Program, Shape
from ridgeline.program.opset import OPSET
from ridgeline.program.passes.fuse import Group
from ridgeline.program.pricing import FLOAT32_BYTES, INDEX_BYTES, ElementBytes, Load, OpCost, Operands, WeightShape

SPAN_BY_SPAN = ("causal_conv", *RECURRENCES)
SHORT = 8  # tokens of a span at most, as kFewTokens of native/kernels/recurrent/recurrence.h


@dataclass(frozen=True, slots=True)
class OpPrice:
    """All that the cost of an op depends on but the load; equal prices cost the same in every step."""

    kind: str
    attrs: Attrs
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    weights: tuple[WeightShape, ...]
    input_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    element: ElementBytes

    def cost(self, load: Load, sizes: Mapping[str, int]) -> OpCost:
        """Return the cost in a step that computes `load`, whose `step_sizes` are `sizes`."""
        inputs, outputs = _concrete(self.inputs, sizes), _concrete(self.outputs, sizes)
        widths = self.input_bytes, self.output_bytes
        return OPSET[self.kind].cost(Operands(self.attrs, inputs, outputs, self.weights, *widths, load, self.element))


def step_sizes(load: Load) -> Mapping[str, int]:
    """Return the sizes of a program's symbolic dimensions in a step."""
    return {"T": load.num_tokens, "R": load.num_rows}


def forms_of(kind: str, load: Load) -> list[tuple[str, Load]]:
    """Return what an op of a kind computes one after the other, each with what is behind the key of its efficiency.

    Recurrent layers take span by span, short ones token by token and long ones in chunks.
    """
    if kind not in SPAN_BY_SPAN:
        return [("", load)]
    short, long = (tuple([s for s in load.spans if (s[0] > SHORT) is is_long]) for is_long in (False, True))
    return [(form, Load(spans, 0)) for form, spans in ((" short", short), (" long", long)) if spans]


def _concrete(shapes: tuple[Shape, ...], sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(dim if isinstance(dim, int) else sizes[dim] for dim in shape) for shape in shapes)


class Pricer:
    """Makes the prices of a program's ops, with the bytes of each value's elements."""

    def __init__(self, program: Program, element: ElementBytes) -> None:
        self._program, self._element = program, element
        self._value_bytes: dict[str, float] = {**dict.fromkeys(STEP_INPUTS, INDEX_BYTES), FEATURES: FLOAT32_BYTES}
        self._readers: dict[str, set[str]] = {}
        for op in program.ops:
            width = FLOAT32_BYTES if OPSET[op.kind].float32_outputs else element.activation
            self._value_bytes.update(dict.fromkeys(op.outputs, width))
            # Attention takes keys, values and latents from the cache; the operands say which.
            for name in op.inputs[:1] if op.kind in ("attention", "latent_attention") else op.inputs:
                self._readers.setdefault(name, set()).add(op.label)

    def price(self, op: Op, here: Set[str] = frozenset()) -> OpPrice:
        """Return the price of `op` where the values named in `here` are in the cores."""

        def widths(names: Sequence[str]) -> tuple[float, ...]:
            return tuple(0 if name in here else self._value_bytes[name] for name in names)

        shapes, row = self._program.shapes, OPSET[op.kind]
        inputs, outputs = (tuple(shapes[name] for name in names) for names in (op.inputs, op.outputs))
        weights = tuple(self._program.weights[name] for name in op.weights)
        element = replace(self._element, weight=FLOAT32_BYTES) if row.float32_weights else self._element
        return OpPrice(op.kind, op.attrs, inputs, outputs, weights, widths(op.inputs), widths(op.outputs), element)

    def together(self, ops: Sequence[Op]) -> tuple[OpPrice, ...]:
        """Return the prices of a group's ops: what only they read stays in the cores, what several read comes once."""
        members = {op.label for op in ops}
        made = {name for op in ops for name in op.outputs} & self._readers.keys()
        here = {name for name in made - {LOGITS} if self._readers[name] <= members}
        prices: list[OpPrice] = []
        for op in ops:
            prices.append(self.price(op, here))
            here.update(op.inputs)
        return tuple(prices)


@dataclass(frozen=True, slots=True)
class GroupPrice:
    """Groups of a program that cost the same in every step: the first one's label, and how many they are."""

    kind: str
    label: str
    count: int
    ops: tuple[OpPrice, ...]

    def cost(self, load: Load) -> OpCost:
        """Return the cost of one of them in a step that computes `load`."""
        sizes = step_sizes(load)
        return sum((price.cost(load, sizes) for price in self.ops), OpCost())


def price_groups(program: Program, groups: Sequence[Group], element: ElementBytes) -> Sequence[GroupPrice]:
    """Return the prices of a program whose ops run in `groups`; their costs are those of `costs_of`."""
    pricer = Pricer(program, element)
    alike: dict[tuple[str, tuple[OpPrice, ...]], list[Group]] = {}
    for group in groups:
        ops = tuple(_without_state(price) for price in pricer.together(group.ops))
        alike.setdefault((group.kind, ops), []).append(group)
    return [GroupPrice(kind, found[0].label, len(found), ops) for (kind, ops), found in alike.items()]


def _without_state(price: OpPrice) -> OpPrice:
    """Return the price with state 0: rules do not look at which state an op reads or writes."""
    if any(field.name == "state" for field in fields(price.attrs)):
        return replace(price, attrs=replace(price.attrs, state=0))
    return price
