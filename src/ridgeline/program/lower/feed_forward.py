"""Dense feed-forwards."""

from ridgeline.program.lower.builder import Builder
from ridgeline.program.ops.dense import ActivationAttrs
from ridgeline.spec.spec import GatedMlp, Mlp


def lower_gated_mlp(b: Builder, at: str, ffn: GatedMlp, x: str) -> str:
    gate = b.linear(f"{at}.gate", x, ffn.size, ffn.bias)
    up = b.linear(f"{at}.up", x, ffn.size, ffn.bias)
    (h,) = b.emit("gated_activation", f"{at}.act", (gate, up), (), ActivationAttrs(ffn.activation))
    return b.linear(f"{at}.down", h, b.spec.hidden_size, ffn.bias)


def lower_mlp(b: Builder, at: str, ffn: Mlp, x: str) -> str:
    up = b.linear(f"{at}.up", x, ffn.size, ffn.bias)
    (h,) = b.emit("activation", f"{at}.act", (up,), (), ActivationAttrs(ffn.activation))
    return b.linear(f"{at}.down", h, b.spec.hidden_size, ffn.bias)
