"""Builder: appends ops to a program in the making. Every part of the lowering writes its ops through it."""

from typing import NamedTuple, assert_never

from ridgeline.program.op import POSITIONS, STEP_INPUTS, Attrs, Op, Plain, Program, Shape, State, dims_of
from ridgeline.program.ops.attention import RopeAnglesAttrs
from ridgeline.program.ops.dense import NormAttrs
from ridgeline.program.opset import OPSET
from ridgeline.spec.spec import DecoderSpec, LayerNorm, Norm, RmsNorm, Rope, UnweightedRmsNorm


class LayerKv(NamedTuple):
    """Keys and values that an attention wrote: the state's number, and the values' names."""

    state: int
    k: str
    v: str


class Builder:
    """Appends ops to a program: a value is named after the op that makes it, a weight after the op that reads it."""

    def __init__(self, spec: DecoderSpec, context_length: int) -> None:
        self.spec = spec
        self.context_length = context_length
        self.shapes: dict[str, Shape] = dict(STEP_INPUTS)
        self._ops: list[Op] = []
        self._weights: dict[str, tuple[int, ...]] = {}
        self._states: list[State] = []
        self._angles: dict[Rope, tuple[str, str]] = {}
        self.layer_kv: dict[str, LayerKv] = {}  # by the label of the attention that writes it

    def program(self, taps: tuple[str, ...] = ()) -> Program:
        """Return the program written so far, with values that are retained."""
        ops, states = tuple(self._ops), tuple(self._states)
        return Program(ops, self.shapes, self._weights, states, self.spec.vocab_size, self.context_length, taps)

    def width(self, x: str) -> int:
        """Return the entries in the last dimension of value `x`."""
        return dims_of(self.shapes[x])[-1]

    def heads(self, x: str) -> int:
        """Return the heads of value `x` [T, N, D]."""
        heads, _ = dims_of(self.shapes[x])
        return heads

    def state(self, state: State) -> int:
        """Return a new state's number."""
        self._states.append(state)
        return len(self._states) - 1

    def rope_angles(self, rope: Rope) -> tuple[str, str]:
        """Return cos and sin of a rope, computed once for all layers that share it."""
        if rope not in self._angles:
            attrs = RopeAnglesAttrs.of_rope(rope, self.context_length)
            name = f"rope.{len(self._angles)}"
            cos, sin = self.emit("rope_angles", name, (POSITIONS,), (), attrs, (f"{name}.cos", f"{name}.sin"))
            self._angles[rope] = (cos, sin)
        return self._angles[rope]

    def norm(self, prefix: str, norm: Norm, x: str) -> str:
        """Add the norm of `x` over its last dimension."""
        if isinstance(norm, UnweightedRmsNorm):
            return self.emit("rmsnorm", prefix, (x,), (), NormAttrs(norm.eps))[0]
        width = self.width(x)
        match norm:
            case RmsNorm():
                scale = self.weight(f"{prefix}.weight", width)
                return self.emit("rmsnorm", prefix, (x,), (scale,), NormAttrs(norm.eps, norm.unit_offset))[0]
            case LayerNorm():
                shape = (self.heads(x), width) if norm.per_head else (width,)
                weights = self.weights(prefix, shape, shape if norm.bias else None)
                return self.emit("layernorm", prefix, (x,), weights, NormAttrs(norm.eps, norm.unit_offset))[0]
        assert_never(norm)

    def linear(self, prefix: str, x: str, out_features: int, bias: bool) -> str:
        """Add x W^T, plus bias."""
        weights = self.weights(prefix, (out_features, self.width(x)), (out_features,) if bias else None)
        return self.emit("linear", prefix, (x,), weights)[0]

    def weights(self, prefix: str, shape: tuple[int, ...], bias: tuple[int, ...] | None) -> tuple[str, ...]:
        """Declare the weight of a module, and its bias where it has one of a shape."""
        weight = self.weight(f"{prefix}.weight", *shape)
        return (weight,) if bias is None else (weight, self.weight(f"{prefix}.bias", *bias))

    def weight(self, name: str, *shape: int) -> str:
        """Declares a weight; one name, one shape."""
        assert self._weights.get(name, shape) == shape, f"{name} has two shapes"
        self._weights[name] = shape
        return name

    def emit(
        self,
        kind: str,
        label: str,
        inputs: tuple[str, ...],
        weights: tuple[str, ...] = (),
        attrs: Attrs = Plain(),  # noqa: B008 - frozen
        outputs: tuple[str, ...] | None = None,
    ) -> tuple[str, ...]:
        """Appends an op; returns the names of its outputs."""
        row = OPSET[kind]
        assert isinstance(attrs, row.attrs), f"{kind} {label} has {attrs}"
        shapes = row.infer(attrs, [self.shapes[i] for i in inputs], [self._weights[w] for w in weights])
        names = outputs if outputs is not None else (label,) * len(shapes)
        self.shapes.update(zip(names, shapes, strict=True))
        self._ops.append(Op(kind, label, inputs, names, weights, attrs))
        return names
