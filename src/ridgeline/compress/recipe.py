"""How models are quantized, pruned and distilled, and heads trained, as options. Help needs neither torch nor numpy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ridgeline.core.config import scheme_names
from ridgeline.core.errors import ConfigError
from ridgeline.core.options import check, option

if TYPE_CHECKING:
    from ridgeline.quant.stored import StoredFormat

GROUP_SIZES = (32, 64, 128)
GROUPED = ("rtn", "gptq", "awq", "hqq")  # methods whose groups have a size of one's choice
SPARSE = ("wanda", "sparsegpt")  # methods that make zeros of weights and round none


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Says on how many windows of text a method looks at a model."""

    samples: int = option(128, "Number of calibration windows.", low=1)
    length: int = option(512, "Tokens of a calibration window.", low=16)
    seed: int = option(0, "Seed that draws the calibration windows.", low=0)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Calibration):
    """Says how a model is quantized."""

    PANEL: ClassVar[str] = "Method"

    method: str = option(
        "gptq",
        "How weights are rounded: gptq, awq, hqq, or rtn, to nearest; mxfp4 or nvfp4, to 4-bit floats; nf4, as "
        "bitsandbytes does; fp8, to 8-bit floats; smoothquant or llm-int8, to 8 bits for inputs that are rounded as "
        "well, of the latter all but outliers. "
        "wanda or sparsegpt: two of every four weights become zero, and none is rounded.",
        metavar="NAME",
    )
    bits: int = option(4, "Bits of a weight.", choices=(4, 8))
    group_size: int | None = option(
        None,
        "Weights that share a scale: 32, 64 or 128, with 8 bits also 0, all of an output. Default: 128 with 4 bits, "
        "0 with 8; 32 in a GGUF file.",
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
    budget_kl: float | None = option(
        None,
        "KL in bits per token, estimated for rounding to nearest: as few matrices get 8 bits as keep it, within "
        "--mean-bits where that is given.",
        above=0,
    )
    rotate: bool = option(
        False, "Rotate hidden states first, so that outliers of a channel become a part of all; a tied head is untied."
    )

    def __post_init__(self) -> None:
        Calibration.__post_init__(self)
        form = self.form()
        least = form.bits + 16 / form.group if form.group else 8
        if self.budget_kl is not None and self.bits == 8:
            raise ConfigError("budget_kl is for --bits 4, of which some matrices get 8")
        if self.mean_bits is not None and (self.bits == 8 or self.mean_bits < least):
            raise ConfigError(
                f"mean_bits is for --bits 4 and from {least:g} on, what all weights have, got {self.mean_bits:g}"
            )

    @property
    def mixed_bits(self) -> float | None:
        """Bits of a weight in the mean that may not be exceeded where matrices have 4 or 8; None: all have one."""
        return self.mean_bits if self.budget_kl is None or self.mean_bits is not None else 9.0

    def form(self) -> "StoredFormat":
        """Return how matrices are stored. Raises ConfigError for what no kernel and no other engine has."""
        from ridgeline.quant import scheme
        from ridgeline.quant.stored import StoredFormat

        if self.method in scheme_names():
            form = scheme(self.method).stored_format(self.group_size, self.zero_points)
            if self.bits not in (4, form.bits) or self.mixed_bits is not None:
                raise ConfigError(f"method {self.method} has {form.bits} bits; leave bits, mean_bits and budget_kl out")
            return form
        if self.method in ("smoothquant", "llm-int8"):
            if self.group_size or self.zero_points or self.mixed_bits is not None:
                raise ConfigError(f"method {self.method} has 8 bits and a scale per output; leave other options out")
            return StoredFormat("uniform", 8, 0, scale="float32")
        if self.method in SPARSE:
            if self.group_size is not None or self.zero_points or self.mixed_bits is not None:
                raise ConfigError(f"method {self.method} rounds nothing; leave options of rounding out")
            return StoredFormat("uniform", 8, 4)  # inputs of which two are zero
        bits = 8 if self.bits == 8 else 4
        if self.method == "hqq":
            if self.zero_points or self.mixed_bits is not None or self.group_size not in (None, *GROUP_SIZES):
                raise ConfigError("method hqq has groups of 32, 64 or 128 and its own zeros; leave other options out")
            return StoredFormat("uniform", bits, self.group_size or 64, "minima")
        group_size = self.group_size if self.group_size is not None else 128 if self.bits == 4 else 0
        if self.bits == 8 and self.zero_points:
            raise ConfigError("8 bits have no zero points here; leave them out, or take 4 bits")
        if self.bits == 8 and group_size == 0:
            return StoredFormat("uniform", 8, 0, scale="float32")
        if group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"group_size must be one of {sizes}, or 0 with 8 bits, got {group_size}")
        return StoredFormat("uniform", bits, group_size, "points" if self.zero_points else "fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRecipe(Calibration):
    """Says how small a model is to become, and in which directions."""

    PANEL: ClassVar[str] = "Pruning"

    params: int | None = option(None, "Number of parameters that may stay.", low=1)
    latency: float | None = option(
        None, "Share of the least time of a decode step that may stay, by the cost model, such as 0.6.", above=0, high=1
    )
    hardware: str = option("this", "What --latency is of: the machine here, or a datasheet, NAME or NAME:COUNT.")
    axes: Literal["both", "width", "depth"] = option(
        "both", "What is cut: width (hidden channels, neurons, heads; of a mixture experts), depth (layers), or both."
    )
    candidates: int = option(16, "Number of shapes that are compared on text.", low=1)

    def __post_init__(self) -> None:
        Calibration.__post_init__(self)
        if (self.params is None) == (self.latency is None):
            raise ConfigError("give either --params or --latency: what the pruned model may have")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillRecipe:
    """Says how a student learns from its teacher."""

    PANEL: ClassVar[str] = "Distillation"

    tokens: int = option(1 << 20, "Number of tokens to train on.", low=1)
    rate: float = option(3e-3, "Learning rate at its peak.", above=0, high=1)
    temperature: float = option(1.0, "Divides the logits of both models before they are compared.", above=0, high=100)
    hidden_loss: bool = option(False, "Compare what layers give as well, through a learned projection.")
    batch_tokens: int = option(8192, "Tokens of a training step.", low=16)
    seed: int = option(0, "Seed that draws the training windows.", low=0)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecipe:
    """Says how a head learns to draft for a model; a bundled model's preset says all but the number of tokens."""

    PANEL: ClassVar[str] = "Training, of heads"

    tokens: int | None = option(None, "Number of tokens to train on. Default: the preset's; 4194304 for heads.", low=1)
    draft_tokens: int = option(3, "Tokens that are drafted one after the other while it learns.", low=1, high=8)
    draft_vocab_size: int = option(0, "Most frequent tokens of the text that it drafts, and no others; 0: all.", low=0)
    rate: float = option(2e-3, "Learning rate at its peak.", above=0, high=1)
    batch_tokens: int = option(4096, "Tokens of a training step.", low=16)
    window_tokens: int = option(256, "Tokens of a training window.", low=16)
    seed: int = option(0, "Seed that draws the training windows.", low=0)

    def __post_init__(self) -> None:
        check(self)
