"""Compute attention over the cache, and rotary positions."""

import torch
import torch.nn.functional as F

from ridgeline.backends.reference.attention import alibi_SNQL, grouped_attention
from ridgeline.backends.reference.memory import Outputs, StepMemory, Tensors
from ridgeline.program.ops.attention import AttentionAttrs, CacheWriteAttrs, RopeAnglesAttrs, RopeAttrs


def rope_angles(attrs: RopeAnglesAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    angles = inputs[0].to(torch.float32)[:, None] * torch.tensor(attrs.frequencies, dtype=torch.float32)
    return (angles.cos() * attrs.scale, angles.sin() * attrs.scale)


def rope(attrs: RopeAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Rotate entry i against entry i + pairs of each head, or 2i against 2i + 1; the other entries pass through."""
    cos, sin = (angle[:, None, :].to(inputs[0].dtype) for angle in inputs[1:])
    pairs = cos.shape[-1]
    passed, x, rest = inputs[0].tensor_split((attrs.offset, attrs.offset + 2 * pairs), dim=-1)
    a, b = x.unflatten(-1, (pairs, 2)).unbind(-1) if attrs.interleaved else x.split(pairs, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(turned, dim=-1).flatten(-2) if attrs.interleaved else torch.cat(turned, dim=-1)
    return (torch.cat((passed, turned, rest), dim=-1),)


def kv_write(attrs: CacheWriteAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    memory.write(attrs.state, inputs[0], inputs[1])
    return ()


def attention(attrs: AttentionAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    q_TND = inputs[0]
    out = torch.empty_like(q_TND)
    for spans in memory.cached(attrs.state, q_TND.dtype, attrs.window):
        q_SQND, (k_SKLD, v_SKLD) = q_TND[spans.rows_SQ], spans.entries
        if spans.is_causal and attrs.softcap is None and attrs.alibi_slopes is None and not weights:
            is_grouped = q_SQND.shape[2] != k_SKLD.shape[1]
            q_SNQD = q_SQND.transpose(1, 2)
            out_SNQD = F.scaled_dot_product_attention(
                q_SNQD, k_SKLD, v_SKLD, is_causal=True, scale=attrs.scale, enable_gqa=is_grouped
            )
            out[spans.rows_SQ] = out_SNQD.transpose(1, 2)
            continue
        bias_SNQL = alibi_SNQL(attrs.alibi_slopes, spans.query_positions_SQ, spans.key_positions_SL)
        sinks_N = weights[0] if weights else None
        how = spans.mask_SQL, attrs.scale, attrs.softcap, bias_SNQL, sinks_N
        out[spans.rows_SQ] = grouped_attention(q_SQND, k_SKLD, v_SKLD, *how)
    return (out.flatten(1),)
