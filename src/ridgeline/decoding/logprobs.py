"""Log-probabilities under the raw model distribution. Called by the sampler for sampled and for prompt tokens."""

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace

from ridgeline.core.arrays import Array
from ridgeline.core.step import TokenLogprob
from ridgeline.decoding.largest import largest


def token_logprobs(logits_RV: Array, wanted: Sequence[tuple[int, int, int]]) -> list[TokenLogprob]:
    """Compute one TokenLogprob per (row, token id, number of top tokens) in `wanted`.

    The rank is 1 + the number of tokens with a strictly larger logit. A logit of -inf gives a log-probability of -inf,
    a NaN in the row gives NaN.
    """
    with np.errstate(all="ignore"):
        return [_token_logprob(logits_RV[row, :], token_id, num_top) for row, token_id, num_top in wanted]


def _token_logprob(logits_V: Array, token_id: int, num_top: int) -> TokenLogprob:
    xp = array_namespace(logits_V)
    rank = 1 + int(xp.count_nonzero(logits_V > logits_V[token_id]))
    peak = xp.max(logits_V)
    log_sum = xp.log(xp.sum(xp.exp(logits_V - peak)))
    logprob = float(logits_V[token_id] - peak - log_sum)
    if not num_top:
        return TokenLogprob(token_id, logprob, rank, ())
    values_K, columns_K = largest(logits_V, num_top)
    top_logprobs = (values_K - peak - log_sum).tolist()
    return TokenLogprob(token_id, logprob, rank, tuple(zip(columns_K.tolist(), top_logprobs)))
