"""Compute multi-head latent attention in the cheaper of its two forms.

Legend: S sequences · Q query tokens of each · L tokens that they keep · N heads · C entries of a latent · E those and
the R rotated ones behind them · D entries of a query, P of them unrotated · V entries of a value.
"""

import torch
from torch import Tensor

from ridgeline.backends.reference.attention import grouped_attention
from ridgeline.backends.reference.memory import CachedSpans, Outputs, StepMemory, Tensors
from ridgeline.program.ops.attention import CacheWriteAttrs
from ridgeline.program.ops.latent import LatentAttentionAttrs, LatentSizes


def latent_write(attrs: CacheWriteAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    memory.write(attrs.state, torch.cat((inputs[0], inputs[1].flatten(1)), dim=1)[:, None])
    return ()


def latent_attention(attrs: LatentAttentionAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    q_TND, (up,) = inputs[0], weights
    sizes = LatentSizes.of(q_TND.shape, inputs[1].shape, inputs[2].shape, up.shape)
    up_NPC, up_NVC = up.unflatten(0, (sizes.num_heads, -1)).split([sizes.nope_dim, sizes.value_dim], dim=1)
    out = q_TND.new_empty(len(q_TND), sizes.num_heads, sizes.value_dim)
    for spans in memory.cached(attrs.state, q_TND.dtype):
        form = expanded if sizes.expands(spans.rows_SQ.shape[1], spans.mask_SQL.shape[2]) else absorbed
        out[spans.rows_SQ] = form(q_TND[spans.rows_SQ], spans, up_NPC, up_NVC, attrs.scale)
    return (out.flatten(1),)


def absorbed(q_SQND: Tensor, spans: CachedSpans, up_NPC: Tensor, up_NVC: Tensor, scale: float) -> Tensor:
    """Compute [S, Q, N, V] with the weights absorbed into queries and output: all heads read the same latents."""
    nope, rank = up_NPC.shape[1:]
    q_SQNC = torch.einsum("sqnp,npc->sqnc", q_SQND[..., :nope], up_NPC)
    q_SQNE = torch.cat((q_SQNC, q_SQND[..., nope:]), dim=-1)
    keys = spans.entries[0]
    out_SQNC = grouped_attention(q_SQNE, keys, keys[..., :rank], spans.mask_SQL, scale, None)
    return torch.einsum("sqnc,nvc->sqnv", out_SQNC, up_NVC)


def expanded(q_SQND: Tensor, spans: CachedSpans, up_NPC: Tensor, up_NVC: Tensor, scale: float) -> Tensor:
    """Compute [S, Q, N, V] with keys and values expanded for every head."""
    num_heads, _, rank = up_NPC.shape
    latent_SLC, shared_SLR = spans.entries[0][:, 0].tensor_split((rank,), dim=-1)
    k_SNLP = torch.einsum("slc,npc->snlp", latent_SLC, up_NPC)
    k_SNLD = torch.cat((k_SNLP, shared_SLR[:, None].expand(-1, num_heads, -1, -1)), dim=-1)
    v_SNLV = torch.einsum("slc,nvc->snlv", latent_SLC, up_NVC)
    return grouped_attention(q_SQND, k_SNLD, v_SNLV, spans.mask_SQL, scale, None)
