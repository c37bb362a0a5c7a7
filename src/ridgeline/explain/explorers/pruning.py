"""Compare a model with one of fewer and narrower layers: what of its bytes and its time goes with them."""

from ridgeline.cost.account import kv_bytes, weight_bytes
from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.explain.limits import shape as shape_of
from ridgeline.explain.pricing import price, spec_of
from ridgeline.program.lower import lower


def explore(
    model: str = "llama-3-8b",
    layers_left: float = 0.5,
    neurons_left: float = 1.0,
    batch: int = 1,
    context: int = 1024,
    card: str = "h100-sxm",
) -> Found:
    """Price the program of the smaller shape, as if it were a model of its own."""

    def smaller(layers: float, neurons: float) -> dict[str, object]:
        shape, remaining = shape_of(model), {"num_hidden_layers": layers, "intermediate_size": neurons}
        return {**shape} | {name: max(1, round(share * float(str(shape[name])))) for name, share in remaining.items()}

    def step_s(layers: float, neurons: float) -> float:
        return price(smaller(layers, neurons), card=card, batch=batch, context=context).limit_s

    pruned, whole = (lower(spec_of(smaller(*remaining))) for remaining in ((layers_left, neurons_left), (1, 1)))
    left, here = weight_bytes(pruned, 2) / weight_bytes(whole, 2), step_s(layers_left, neurons_left)
    gain = step_s(1, 1) / here
    figures = (
        Figure("parameters", pruned.num_parameters, "", f"of {whole.num_parameters:,}", "counted"),
        Figure("weights", weight_bytes(pruned, 2), "B", "2 bytes each", "counted"),
        Figure("left", left, "share", "of the bytes: embedding and head stay", "counted"),
        Figure("kv_per_token", kv_bytes(pruned, 1, 2), "B", "of the layers that are left", "counted"),
        Figure("step", here, "s", f"decode at batch {batch:,}, the op table's limit", "datasheet"),
        Figure("gain", gain, "×", "whole ÷ pruned", "datasheet"),
        Figure("zeros", 1, "×", "as many weights made zero at their places: all are still read", "counted"),
    )
    sentence = (
        f"{left:.1%} of the bytes are left, and a decode step is at most {gain:.2f}× as fast; what it says is another."
    )
    points = [
        (share, step_s(1, 1) / step_s(share, neurons_left)) for share in (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1)
    ]
    return sentence, figures, (Series("gain", "layers remaining", "×", points),)
