"""In how many bits the inputs of integer matrices are multiplied, and which of them share a scale.

Both follow from the model and its options, never from a step: what is computed beside a token, in which chunks, and how
much of it was cached must not change its results.
"""

from collections.abc import Mapping
from typing import Literal

from ridgeline.core.config import Choice, InputBits
from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import StoredFormat

Inputs = Literal["int16", "int8"]

FP4 = {("e2m1", "e8m0", 32), ("e2m1", "e4m3", 16)}  # MXFP4 and NVFP4
TABLE_GROUPS = (32, 64)  # of bitsandbytes' codes
MAX_GROUP = 256  # inputs that share a scale: sums of 32 bits hold their products
# Inputs that share a scale where all weights of an output do.
GROUP_OF_WHOLE_OUTPUTS: Mapping[Inputs, int] = {"int16": 256, "int8": 64}


def chosen_inputs(asked: InputBits) -> Inputs:
    """Return the inputs' type; auto takes int8."""
    return "int8" if asked == "auto" else asked


def describe_inputs(asked: InputBits, chosen: Choice, *, has_integers: bool) -> Mapping[str, Choice]:
    """Return the choice of the inputs' type, as it is made with integers; none for a model without a matrix of them.

    Raises ConfigError where a type was asked for and there is no such matrix.
    """
    if has_integers:
        return {"quantize_inputs": chosen}
    if asked != "auto":
        why = f"quantize_inputs={asked} is for matrices of integers, and no matrix of this model is quantized"
        raise ConfigError(f"{why}; add quantize=int8 or int4, or leave it out")
    return {}


def why_decoded(form: StoredFormat) -> str:
    """Return why matrices so stored are decoded; empty where they are multiplied as they are."""
    if form.code in ("nf4", "fp4"):
        return "" if form.group in TABLE_GROUPS else f"no kernel has {form}"
    if form.code == "e4m3":
        return f"no kernel has groups of {form.group} inputs" if form.group % 32 else ""
    if form.code != "uniform":
        return "" if (form.code, form.scale, form.group) in FP4 else f"no kernel multiplies {form.code}"
    if form.scale == "product":
        known = (4, "minima", 32), (8, "minima", 32), (8, "minima", 16), (8, "fixed", 32), (8, "fixed", 16)
        return "" if (form.bits, form.zero, form.group) in known else f"no kernel has such scales of {form}"
    if form.bits == 8 and form.zero == "points":
        return "no kernel has 8 bits with zero points"
    if form.group == 0:
        return "" if form.bits == 8 and form.scale == "float32" else "no kernel has 4 bits without groups"
    if form.group % 32 or form.group > MAX_GROUP:
        return f"no kernel has groups of {form.group} inputs"
    return "" if form.scale == "float16" else "float16 cannot hold its scales"


def has_integer_inputs(form: StoredFormat) -> bool:
    """Tell whether matrices so stored are multiplied by inputs in integers; 8-bit floats are by floats."""
    return form.code != "e4m3"


def input_group(form_group: int, inputs: Inputs) -> int:
    """Return the inputs of a token that share a scale: those of a group of the weights, where these have groups."""
    return form_group or GROUP_OF_WHOLE_OUTPUTS[inputs]
