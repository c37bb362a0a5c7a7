"""Implement multi-head latent attention as instructions of a tape, and its weights by head."""

from dataclasses import replace

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler
from ridgeline.backends.native.settings import MatrixFormat
from ridgeline.backends.native.weights import PANEL
from ridgeline.core.dtypes import Array, contiguous
from ridgeline.program.op import Op
from ridgeline.program.ops.attention import CacheWriteAttrs
from ridgeline.program.ops.latent import LatentAttentionAttrs, LatentSizes
from ridgeline.quant import dequantize, quantize


def latent_write(compiler: Compiler, op: Op, attrs: CacheWriteAttrs) -> None:
    (latent, key), (memory, cache_group) = compiler.inputs(op), compiler.cache.kv[attrs.state]
    compiler.tape.latent_write(latent, key, memory, cache_group)


def latent_attention(compiler: Compiler, op: Op, attrs: LatentAttentionAttrs) -> None:
    sizes = LatentSizes.of_op(compiler.program, op)
    matrices, memory = _matrices(compiler, op.weights[0], sizes), compiler.cache.kv[attrs.state]
    q, out = compiler.place(op.inputs[0]).buffer, compiler.output(op)
    compiler.tape.latent_attention(sizes.num_heads, attrs.scale, *matrices, *memory, q, out)


def _matrices(compiler: Compiler, name: str, sizes: LatentSizes) -> tuple[_native.Matrix, _native.Matrix]:
    """Return W_k [heads * latent, nope] to absorb into queries, and [heads * (nope + value), latent] to expand latents.

    Every head begins a new panel, and so do its rows of W_v. What is taken into the queries is what the other form
    computes with, in the model's own dtype: quantized the other way around, its scales would lie across the sums.
    """
    heads, nope, value = sizes.num_heads, sizes.nope_dim, sizes.value_dim
    form = compiler.formats.of(name)

    def keys_turned(_: int) -> Array:
        by_head = _as_stored(compiler.weights.tensor(name), form).reshape(heads, nope + value, -1)
        return contiguous(by_head[:, :nope].swapaxes(1, 2)).reshape(-1, nope)

    plain = compiler.settings.plain
    absorb = compiler.weights.rows(f"{name}.absorb", keys_turned, _by_panels(heads, [sizes.latent_dim]), nope, plain)
    order = _by_panels(heads, [nope, value])
    # The lengths of a span choose the form, and only this one would see inputs of 8 bits.
    finer = replace(form, inputs="int16") if form.inputs == "int8" else form
    read, weights = compiler.weights.tensor, compiler.weights
    return absorb, weights.rows(f"{name}.expand", lambda _: read(name), order, sizes.latent_dim, finer)


def _as_stored(weight: Array, form: MatrixFormat) -> Array:
    """Return the weight as the format stores it."""
    if form.kind in ("f32", "bf16"):
        return weight
    return dequantize(quantize(form.scheme_name, weight, form.stored_format))


def _by_panels(num_heads: int, pieces: list[int]) -> np.ndarray:
    """Return rows [heads, pieces] in order, -1 after each piece up to a whole panel."""
    rows = np.arange(num_heads * sum(pieces)).reshape(num_heads, -1)
    cut = np.split(rows, np.cumsum(pieces)[:-1], axis=1)
    return np.concatenate([np.pad(p, ((0, 0), (0, -p.shape[1] % PANEL)), constant_values=-1) for p in cut], 1).flatten()
