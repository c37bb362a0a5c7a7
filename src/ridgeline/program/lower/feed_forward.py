"""Lower dense feed-forwards."""

from ridgeline.program.lower.builder import Builder
from ridgeline.program.ops.dense import ActivationAttrs
from ridgeline.spec.spec import GatedMlp, Mlp


def lower_gated_mlp(b: Builder, prefix: str, ffn: GatedMlp, x: str) -> str:
    gate = b.linear(f"{prefix}.gate", x, ffn.size, ffn.bias)
    up = b.linear(f"{prefix}.up", x, ffn.size, ffn.bias)
    (h,) = b.emit("gated_activation", f"{prefix}.act", (gate, up), (), ActivationAttrs(ffn.activation))
    return b.linear(f"{prefix}.down", h, b.spec.hidden_size, ffn.bias)


def lower_mlp(b: Builder, prefix: str, ffn: Mlp, x: str) -> str:
    up = b.linear(f"{prefix}.up", x, ffn.size, ffn.bias)
    (h,) = b.emit("activation", f"{prefix}.act", (up,), (), ActivationAttrs(ffn.activation))
    return b.linear(f"{prefix}.down", h, b.spec.hidden_size, ffn.bias)
