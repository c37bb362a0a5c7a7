"""Weights as small numbers with scales: rounded to nearest when a model is loaded, from any checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ridgeline.core.config import QuantizeConfig
from ridgeline.core.dtypes import Array, Float32s, float32, to_dtype
from ridgeline.core.errors import ModelLoadError
from ridgeline.program.op import TOKEN_IDS, Program
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.program.ops.experts import expert_matrices, routers
from ridgeline.program.passes.fuse import fuse
from ridgeline.quant.inputs import why_decoded
from ridgeline.quant.schemes import scheme
from ridgeline.quant.stored import StoredFormat, StoredMatrix, dequantize, joined

CHUNK_ELEMENTS = 2**16  # of float32 at a time: temporaries stay in a core's cache

Run = Callable[[Callable[[int], StoredMatrix], Iterable[int]], Iterable[StoredMatrix]]


def chosen_format(config: QuantizeConfig) -> StoredFormat:
    """Return how the scheme of a configuration stores matrices. Raises ConfigError for options that it lacks."""
    assert config.scheme is not None
    return scheme(config.scheme).stored_format(config.group_size, config.zero_points)


def quantize(name: str, weight_NK: Array, form: StoredFormat, run: Run = map) -> StoredMatrix:
    """Round a matrix of any float type in the scheme of that name; `run` may compute rows on several threads.

    Raises ModelLoadError where the matrix has NaN, infinity or a magnitude that a scale cannot hold.
    """
    chosen = scheme(name)
    num_rows = max(1, CHUNK_ELEMENTS // max(1, weight_NK.shape[1]))

    def rows_from(begin: int) -> StoredMatrix:
        with np.errstate(all="ignore"):  # what is no number shows in the scales
            part = chosen.quantize(float32(weight_NK[begin : begin + num_rows]), form)
        _require_finite(part.scales, begin)
        return part

    return joined(list(run(rows_from, range(0, len(weight_NK), num_rows))))


def _require_finite(scales: Float32s, first_row: int) -> None:
    """Raise ModelLoadError that names the first row whose scales are no finite numbers."""
    bad = ~np.isfinite(scales).all(axis=1)
    if bad.any():
        what = "has NaN, infinity or a value too large to quantize"
        advice = "the checkpoint is damaged, or run it without quantization"
        raise ModelLoadError(f"row {first_row + int(bad.argmax())} of a weight matrix {what}; {advice}")


def quantized_names(program: Program, *, embeddings: bool) -> frozenset[str]:
    """Return the weights that a scheme applies to: the matrices of linear layers, latent attentions and experts.

    They are [N, K], or of experts [E, N, K]. With `embeddings` also embedding and head. Routers, norms, biases and
    learned positions stay as they are.
    """
    layers = {op.weights[0] for op in program.ops if op.kind in ("linear", "latent_attention")} - routers(program)
    layers -= {name for name in layers if name.startswith("classifier.")}
    layers |= {name for op in program.ops if op.kind == "experts" for name in op.weights[:3]}
    heads = {op.weights[0] for op in program.ops if op.kind == "lm_head"}
    tables = {op.weights[0] for op in program.ops if op.kind == "embed" and op.inputs == (TOKEN_IDS,)}
    return frozenset(layers | heads | tables if embeddings else layers - heads - tables)


def prequantized_matrices(forms: Mapping[str, StoredFormat], program: Program) -> Mapping[str, StoredFormat]:
    """Return the matrices that are computed with as a checkpoint stores them, of those that it stores in `forms`.

    Those of a layer that run as one matrix do so only where they are stored alike, else each by itself; the gate and up
    of experts, which nothing runs apart, are among them where they are stored alike.
    """
    found: dict[str, StoredFormat] = {}
    of_experts = {name for op in program.ops if op.kind == "experts" for name in op.weights[:3]}
    for names in matrices_together(program) if forms else ():
        alike = len({forms.get(name) for name in names}) == 1
        for name in names:
            form = forms.get(name)
            if form is not None and not why_decoded(form) and (alike or name not in of_experts):
                found[name] = form
    return found


def decoded_matrices(forms: Mapping[str, StoredFormat], program: Program) -> Mapping[str, str]:
    """Return the other matrices of `forms`, those that are decoded, and why."""
    found = prequantized_matrices(forms, program)
    together = {name for names in matrices_together(program) for name in names}
    others = "it runs as one matrix with others, which are stored otherwise", "its op computes with floats alone"
    why = {name: why_decoded(form) or others[name not in together] for name, form in forms.items()}
    return {name: reason for name, reason in why.items() if name not in found}


def matrices_together(program: Program) -> Iterator[Sequence[str]]:
    """Yield the weights that are read as matrices, those of one matrix together; a router's is never among them."""
    for group in fuse(program):
        names = [op.weights[0] for op in group.ops if op.kind in MATRIX_OPS]
        if names and names[0] not in routers(program):
            yield names
        for op in group.ops:
            if op.kind == "embed" and op.inputs == (TOKEN_IDS,):
                yield op.weights[:1]
            elif op.kind == "experts":
                yield from expert_matrices(op)


def dequantized_weights(
    program: Program, weights: Mapping[str, Array], name: str, form: StoredFormat, *, embeddings: bool
) -> dict[str, Array]:
    """Return `weights` as a quantized model computes with them, in their own dtypes.

    Exact in float32; a narrower dtype rounds once more.
    """
    chosen = quantized_names(program, embeddings=embeddings)

    def round_trip(weight: Array) -> Array:
        rounded_NK = dequantize(quantize(name, weight.reshape(-1, weight.shape[-1]), form))
        return to_dtype(rounded_NK, weight.dtype).reshape(weight.shape)

    return {key: round_trip(weight) if key in chosen else weight for key, weight in weights.items()}
