"""Recipe: how a model is quantized, as options of a command. Help waits for neither torch nor numpy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ridgeline.core.config import scheme_names
from ridgeline.core.errors import ConfigError
from ridgeline.core.options import check, option

if TYPE_CHECKING:
    from ridgeline.quant.stored import StoredFormat

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Says how a model is quantized, and on how many windows of text the method is calibrated."""

    PANEL: ClassVar[str] = "Method"

    method: str = option(
        "gptq",
        "How weights are rounded: gptq, awq, or rtn, to nearest; mxfp4 or nvfp4, to 4-bit floats; nf4, as bitsandbytes "
        "does; fp8, to 8-bit floats.",
        metavar="NAME",
    )
    bits: int = option(4, "Bits of a weight.", choices=(4, 8))
    group_size: int | None = option(
        None,
        "Weights that share a scale: 32, 64 or 128, with 8 bits also 0, all of an output. Default: 128 with 4 bits, "
        "0 with 8.",
        low=0,
    )
    zero_points: bool = option(False, "4 bits: store a zero point beside each scale.")
    mean_bits: float | None = option(
        None,
        "Bits of a weight in the mean, with its share of the scales: matrices that cost most get 8 instead of 4. "
        "Default: all have --bits.",
        above=4,
        high=9,
    )
    samples: int = option(128, "Number of calibration windows.", low=1)
    length: int = option(512, "Tokens of a calibration window.", low=16)
    seed: int = option(0, "Seed that draws the calibration windows.", low=0)

    def __post_init__(self) -> None:
        check(self, lambda name, message: ConfigError(message))
        form = self.form()
        least = form.bits + 16 / form.group if form.group else 8
        if self.mean_bits is not None and (self.bits == 8 or self.mean_bits < least):
            raise ConfigError(
                f"mean_bits is for --bits 4 and from {least:g} on, what all weights have, got {self.mean_bits:g}"
            )

    def form(self) -> "StoredFormat":
        """Return how matrices are stored. Raises ConfigError for what no kernel and no other engine has."""
        from ridgeline.quant import scheme
        from ridgeline.quant.stored import StoredFormat

        if self.method in scheme_names():
            form = scheme(self.method).stored_format(self.group_size, self.zero_points)
            if self.bits not in (4, form.bits) or self.mean_bits is not None:
                raise ConfigError(f"method {self.method} has {form.bits} bits; leave bits and mean_bits out")
            return form
        group_size = self.group_size if self.group_size is not None else 128 if self.bits == 4 else 0
        if self.bits == 8 and self.zero_points:
            raise ConfigError("8 bits have no zero points here; leave them out, or take 4 bits")
        if self.bits == 8 and group_size == 0:
            return StoredFormat("uniform", 8, 0, scale="float32")
        if group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"group_size must be one of {sizes}, or 0 with 8 bits, got {group_size}")
        return StoredFormat(
            "uniform", 8 if self.bits == 8 else 4, group_size, "points" if self.zero_points else "fixed"
        )
