"""One number in the dtypes of weights: its bits, what they say, and the error; and what an outlier does to others."""

import ml_dtypes
import numpy as np

from ridgeline.explain.exploration import Figure, Found, Grid

FLOATS = (
    ("float32", np.dtype(np.float32), np.dtype(np.uint32), 8),
    ("bfloat16", np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16), 8),
    ("float16", np.dtype(np.float16), np.dtype(np.uint16), 5),
    ("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8), 4),
)
"""Name, dtype, integers of the same width, bits of the exponent."""


NEIGHBOURS = 4095


def explore(value: float = 0.1, largest: float = 1.0, outlier: float = 1000.0) -> Found:
    """Round the number to each dtype and read its bits; round drawn values with the outlier's scale and their own."""
    figures: list[Figure] = []
    rows: list[tuple[str, list[str], str]] = []
    for name, dtype, unsigned, exponent_bits in FLOATS:
        with np.errstate(over="ignore"):
            stored = np.array([value]).astype(dtype)
        width = 8 * dtype.itemsize
        bits = f"{int(stored.view(unsigned)[0]):0{width}b}"
        rows.append((name, [*bits], "0" + "1" * exponent_bits + "2" * (width - 1 - exponent_bits)))
        parts = f"sign exponent fraction: {bits[0]} {bits[1 : 1 + exponent_bits]} {bits[1 + exponent_bits :]}"
        rounded = float(stored.astype(np.float64)[0])
        figures.append(Figure(name, rounded if np.isfinite(rounded) else None, "", parts, "counted"))
    for name, most in (("int8", 127), ("int4", 7)):
        step = largest / most
        steps = max(-most, min(most, round(value / step)))
        figures.append(Figure(name, steps * step, "", f"{steps} steps of {step:.4g}", "counted"))
    worst = max(figures, key=lambda figure: float("inf") if figure.value is None else abs(figure.value - value))
    sentence = f"{value:g} is furthest from itself in {worst.name}: {worst.text}."
    others = np.random.default_rng(0).standard_normal(NEIGHBOURS)

    def error(step: float) -> float:
        return float(np.sqrt(np.mean((np.round(others / step) * step - others) ** 2) / np.mean(others**2)))

    step, own = outlier / 127, float(np.abs(others).max()) / 127
    figures += (
        Figure("outlier_step", step, "", f"{outlier:g} ÷ 127: the scale of its row in int8", "counted"),
        Figure("zeroed", step / 2, "", "what is below is 0", "counted"),
        Figure(
            "outlier_error",
            error(step),
            "share",
            f"of {NEIGHBOURS:,} drawn values beside it, root mean square",
            "counted",
        ),
        Figure("split_error", error(own), "share", "the same with the outlier split off", "counted"),
    )
    return sentence, figures, (Grid("bits: 0 sign, 1 exponent, 2 fraction", rows),)
