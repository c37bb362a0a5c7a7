"""Compute masked grouped-query attention over dense keys and values, in plain torch.

Legend: S sequences · Q query tokens of each · L keys · N query heads · K key/value heads · D head size · G = N / K.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 8  # up to this many query rows per key head, bfloat16: two batched products beat SDPA's loop over heads


def grouped_attention(
    q_SQND: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    mask_SQL: Tensor,
    scale: float,
    softcap: float | None,
    bias_SNQL: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T, soft-capped, plus bias and mask) v, [S, Q, N, D of the values] in q's dtype.

    `sinks_N` are further logits of every query, without a value.

    `mask_SQL` is 0 or -inf in the dtype of q; every query must see at least one key. The G query heads that share a
    key head are laid side by side as queries of it, so that keys and values are never repeated in memory.
    """
    num_seqs, num_queries, num_heads, _ = q_SQND.shape
    num_kv_heads = k_SKLD.shape[1]
    group = num_heads // num_kv_heads
    q = q_SQND.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [S, K, G*Q, D]
    mask = mask_SQL[:, None].repeat(1, 1, group, 1)
    few_rows = q.dtype is torch.bfloat16 and q.shape[2] <= FEW_ROWS
    if softcap is None and bias_SNQL is None and sinks_N is None and not few_rows:
        out = F.scaled_dot_product_attention(q, k_SKLD, v_SKLD, attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(q, k_SKLD.transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias_SNQL is not None:
            scores = scores + bias_SNQL.unflatten(1, (num_kv_heads, group)).flatten(2, 3)
        scores = scores + mask
        if sinks_N is not None:
            sinks = sinks_N.float().view(num_kv_heads, group, 1).expand(num_seqs, -1, -1, num_queries).flatten(2)
            scores = torch.cat((scores, sinks[..., None]), dim=-1)
        out = torch.matmul(scores.softmax(-1)[..., : k_SKLD.shape[2]].to(v_SKLD.dtype), v_SKLD)
    out = out.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4)  # [S, Q, K, G, D]
    return out.reshape(num_seqs, num_queries, num_heads, -1)


def alibi_SNQL(slopes_N: Sequence[float] | None, query_positions_SQ: Tensor, key_positions_SL: Tensor) -> Tensor | None:
    """Compute the ALiBi bias of each head's logits, float32; None without slopes."""
    if slopes_N is None:
        return None
    distance_SQL = key_positions_SL[:, None, :] - query_positions_SQ[:, :, None]
    return torch.tensor(slopes_N)[:, None, None] * distance_SQL[:, None]


def mask_of(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `visible`, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def visible_keys_SQL(
    query_positions_SQ: Tensor,
    key_positions_SL: Tensor,
    kv_length_S: Tensor,
    bidirectional_block_S: Tensor,
    window: int | None,
) -> Tensor:
    """Return which keys each query sees: those of its own sequence up to the end of its block, within the window.

    The queries of a span attend to everything before and inside their block of `bidirectional_block_S` positions,
    counted from its first; 1 is causal.
    """
    query, key = query_positions_SQ[:, :, None], key_positions_SL[:, None, :]
    start, run = query[:, :1], bidirectional_block_S[:, None, None]
    run_end = start + ((query - start) // run + 1) * run
    visible = (key < kv_length_S[:, None, None]) & (key < run_end)
    if window is not None:
        visible &= key > query - window
    return visible
