"""The sampler's rules again, one row at a time in float64 numpy: slow, plain, and written from the documented rules."""

import numpy as np

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import SampleRow

_MASK = 2**64 - 1


def make_row(
    row=0,
    seed=0,
    num_output=None,
    prompt_ids=(),
    output_ids=(),
    stop_ids=(),
    banned_ids=(),
    allowed=None,
    seq_id=None,
    **params,
) -> SampleRow:
    return SampleRow(
        seq_id=row if seq_id is None else seq_id,
        row=row,
        params=SamplingParams(**params),
        seed=seed,
        num_output=len(output_ids) if num_output is None else num_output,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        stop_ids=stop_ids,
        banned_ids=banned_ids,
        allowed=allowed,
    )


def edited(logits_V, row):
    """Logits after bias, banned ids, min_tokens and penalties."""
    x_V, params = np.array(logits_V, dtype=np.float64), row.params
    if row.allowed is not None:
        x_V[[not int(row.allowed[i // 64]) >> i % 64 & 1 for i in range(len(x_V))]] = -np.inf
    if params.allowed_token_ids:
        x_V[[i for i in range(len(x_V)) if i not in params.allowed_token_ids]] = -np.inf
    for token_id, bias in params.logit_bias.items():
        x_V[token_id] += bias
    x_V[list(row.banned_ids)] = -np.inf
    for word in params.bad_word_ids:
        if [*row.output_ids, word[-1]][-len(word) :] == list(word):
            x_V[word[-1]] = -np.inf
    if row.num_output < params.min_tokens:
        x_V[[*row.stop_ids, *params.stop_token_ids]] = -np.inf
    for token_id in {*row.prompt_ids, *row.output_ids}:
        above = x_V[token_id] > 0
        x_V[token_id] = (
            x_V[token_id] / params.repetition_penalty if above else x_V[token_id] * params.repetition_penalty
        )
    for token_id in set(row.output_ids):
        x_V[token_id] -= params.frequency_penalty * list(row.output_ids).count(token_id) + params.presence_penalty
    return x_V


def softmax(x_V):
    weights_V = np.exp(x_V - x_V.max())
    return weights_V / weights_V.sum()


def probabilities(logits_V, row):
    """(probabilities, how near top_p came to a tie) of a random row; vLLM's order: temperature, min_p, top_k, top_p."""
    params = row.params
    x_V = edited(logits_V, row) / params.temperature
    if params.min_p > 0:
        p_V = softmax(x_V)
        x_V = np.where(p_V >= params.min_p * p_V.max() * (1 - 1e-12), x_V, -np.inf)
    by_size = sorted(range(len(x_V)), key=lambda i: (-x_V[i], i))
    if params.top_k > 0:
        x_V[by_size[params.top_k :]] = -np.inf
    margin = np.inf
    if params.top_p < 1:
        mass = np.cumsum(softmax(x_V)[by_size])
        margin = np.abs(mass - params.top_p).min()
        x_V[by_size[int(np.searchsorted(mass, params.top_p)) + 1 :]] = -np.inf
    return softmax(x_V), margin


def inverse_cdf(p_V, u):
    """(token, distance of u to the nearest step of the CDF)."""
    cdf_V = np.cumsum(p_V)
    return int(np.searchsorted(cdf_V, u, side="right")), np.abs(cdf_V - u).min()


def philox_word(seed, num_output):
    """First word of Philox4x64-10 (Salmon et al. 2011), key (seed mod 2^64, 0), counter (num_output + 1, 0, 0, 0)."""
    c0, c1, c2, c3 = num_output + 1, 0, 0, 0
    k0, k1 = seed & _MASK, 0
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & _MASK, (left >> 64) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return c0
