"""Multi-head latent attention as instructions of a tape, and its weights by head."""

from collections.abc import Mapping

import numpy as np
import torch

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler, Emitter
from ridgeline.backends.native.settings import MatrixFormat, format_of
from ridgeline.backends.native.weights import PANEL
from ridgeline.program.ops.latent import LatentAttentionAttrs, LatentSizes, LatentWriteAttrs
from ridgeline.program.passes.fuse import Group
from ridgeline.quant import dequantize, quantize


def _latent_write(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, LatentWriteAttrs)
    latent, key = (at.place(name) for name in op.inputs)
    memory, cache_group = at.memories[op.attrs.state]
    at.tape.latent_write(latent.buffer, key.buffer, memory, cache_group)


def _latent_attention(at: Compiler, group: Group) -> None:
    (op,) = group.ops
    assert isinstance(op.attrs, LatentAttentionAttrs)
    sizes = LatentSizes.of_op(at.program, op)
    absorb, expand = _matrices(at, op.weights[0], sizes)
    memory, cache_group = at.memories[op.attrs.state]
    q, out = at.place(op.inputs[0]), at.new(op.outputs[0])
    scale = op.attrs.scale
    at.tape.latent_attention(sizes.num_heads, scale, absorb, expand, memory, cache_group, q.buffer, out.buffer)


def _matrices(at: Compiler, name: str, sizes: LatentSizes) -> tuple[_native.Matrix, _native.Matrix]:
    """W_k [heads * latent, nope] to take into the queries, and [heads * (nope + value), latent] to expand latents with.

    Every head begins a new panel, and so do its rows of W_v. What is taken into the queries is what the other form
    computes with, in the model's own dtype: quantized the other way around, its scales would lie across the sums.
    """
    heads, nope, value = sizes.num_heads, sizes.nope_dim, sizes.value_dim
    form = format_of(at.settings, at.program, name)

    def keys_turned(_: int) -> torch.Tensor:
        by_head = _as_stored(at.weights.tensor(name), form).unflatten(0, (heads, nope + value))
        return by_head[:, :nope].transpose(1, 2).flatten(0, 1)

    plain = at.settings.plain
    absorb = at.weights.rows(f"{name}.absorb", keys_turned, _by_panels(heads, [sizes.latent_dim]), nope, plain)
    order = _by_panels(heads, [nope, value])
    return absorb, at.weights.rows(f"{name}.expand", lambda _: at.weights.tensor(name), order, sizes.latent_dim, form)


def _as_stored(weight: torch.Tensor, form: MatrixFormat) -> torch.Tensor:
    """What the format makes of it."""
    if form.kind in ("f32", "bf16"):
        return weight
    return dequantize(form.kind, quantize(form.kind, weight, form.group, form.zero_points))


def _by_panels(num_heads: int, pieces: list[int]) -> np.ndarray:
    """Rows [heads, pieces] in order, -1 after each piece up to a whole panel."""
    rows = np.arange(num_heads * sum(pieces)).reshape(num_heads, -1)
    cut = np.split(rows, np.cumsum(pieces)[:-1], axis=1)
    return np.concatenate([np.pad(p, ((0, 0), (0, -p.shape[1] % PANEL)), constant_values=-1) for p in cut], 1).flatten()


LATENT_EMITTERS: Mapping[str, Emitter] = {"latent_write": _latent_write, "latent_attention": _latent_attention}
