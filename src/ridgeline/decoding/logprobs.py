"""Log-probabilities under the raw model distribution. Called by the sampler for sampled and for prompt tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.core.step import TokenLogprob
from ridgeline.decoding.largest import largest

_CHUNK_ROWS = 16  # bounds the scratch memory: a prefill may ask for thousands of rows


@torch.inference_mode()
def token_logprobs(logits_RV: Tensor, wanted: Sequence[tuple[int, int, int]]) -> list[TokenLogprob]:
    """One TokenLogprob per (row, token id, number of top tokens) in `wanted`.

    The rank is 1 + the number of tokens with a strictly larger logit. A logit of -inf gives a log-probability of -inf,
    a NaN in the row gives NaN.
    """
    found: list[TokenLogprob] = []
    for start in range(0, len(wanted), _CHUNK_ROWS):
        found += _chunk_logprobs(logits_RV, wanted[start : start + _CHUNK_ROWS])
    return found


def _chunk_logprobs(logits_RV: Tensor, wanted: Sequence[tuple[int, int, int]]) -> list[TokenLogprob]:
    rows, token_ids, num_tops = zip(*wanted)
    device = logits_RV.device
    logits_CV = logits_RV.index_select(0, torch.tensor(rows, device=device))
    token_C1 = torch.tensor(token_ids, device=device).unsqueeze(1)
    ranks: list[int] = (1 + (logits_CV > logits_CV.gather(1, token_C1)).sum(-1)).tolist()
    top_ids_CK = largest(logits_CV, max(num_tops))[1] if any(num_tops) else token_C1[:, :0]
    logprobs_CV = logits_CV.log_softmax(-1)
    chosen: list[float] = logprobs_CV.gather(1, token_C1).squeeze(1).tolist()
    top_logprobs: list[list[float]] = logprobs_CV.gather(1, top_ids_CK).tolist()
    top_ids: list[list[int]] = top_ids_CK.tolist()
    return [
        TokenLogprob(token_id, chosen[i], ranks[i], tuple(zip(top_ids[i][:num_top], top_logprobs[i][:num_top])))
        for i, (token_id, num_top) in enumerate(zip(token_ids, num_tops))
    ]
