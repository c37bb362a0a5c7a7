"""Lower feed-forwards, dense and mixtures of experts."""

from ridgeline.program.lower.builder import Builder
from ridgeline.program.ops.dense import ActivationAttrs
from ridgeline.program.ops.experts import ExpertsAttrs, RouteAttrs
from ridgeline.spec.spec import GatedMlp, MixtureOfExperts, Mlp


def lower_gated_mlp(b: Builder, prefix: str, ffn: GatedMlp, x: str) -> str:
    gate = b.linear(f"{prefix}.gate", x, ffn.size, ffn.bias)
    up = b.linear(f"{prefix}.up", x, ffn.size, ffn.bias)
    (h,) = b.emit("gated_activation", f"{prefix}.act", (gate, up), (), ActivationAttrs(ffn.activation))
    return b.linear(f"{prefix}.down", h, b.spec.hidden_size, ffn.bias)


def lower_mlp(b: Builder, prefix: str, ffn: Mlp, x: str) -> str:
    up = b.linear(f"{prefix}.up", x, ffn.size, ffn.bias)
    (h,) = b.emit("activation", f"{prefix}.act", (up,), (), ActivationAttrs(ffn.activation))
    return b.linear(f"{prefix}.down", h, b.spec.hidden_size, ffn.bias)


def lower_experts(b: Builder, prefix: str, ffn: MixtureOfExperts, x: str) -> str:
    ids, weights = _route(b, prefix, ffn, x)
    num, size, hidden = ffn.num_experts, ffn.size, b.spec.hidden_size
    shapes = {"gate": (num, size, hidden), "up": (num, size, hidden), "down": (num, hidden, size)}
    matrices = [b.weight(f"{prefix}.{name}.weight", *shape) for name, shape in shapes.items()]
    if ffn.bias:
        matrices += [b.weight(f"{prefix}.{name}.bias", *shape[:2]) for name, shape in shapes.items()]
    (y,) = b.emit("experts", f"{prefix}.experts", (x, ids, weights), tuple(matrices), ExpertsAttrs(ffn.activation))
    if ffn.shared is None:
        return y
    shared = lower_gated_mlp(b, f"{prefix}.shared", ffn.shared, x)
    if ffn.shared_gate:
        gate = b.linear(f"{prefix}.shared_gate", x, 1, bias=False)
        (shared,) = b.emit("gate_rows", f"{prefix}.shared_gated", (shared, gate))
    return b.emit("add", f"{prefix}.sum", (y, shared))[0]


def _route(b: Builder, prefix: str, ffn: MixtureOfExperts, x: str) -> tuple[str, str]:
    """Return the numbers of each token's experts, and their weights."""
    routing = ffn.routing
    logits = b.linear(f"{prefix}.router", x, ffn.num_experts, routing.router_bias)
    bias = (b.weight(f"{prefix}.route.bias", ffn.num_experts),) if routing.selection_bias else ()
    prefix = f"{prefix}.route"
    outputs = (f"{prefix}.ids", f"{prefix}.weights")
    ids, weights = b.emit("route", prefix, (logits,), bias, RouteAttrs(routing), outputs)
    return ids, weights
