"""Sample one token from processed logits, by inverse CDF in integers. Called by the sampler, its weights by top_p.

The rule, complete, so that another implementation can give the same tokens:

    m  = largest logit of the row                                  (fp32)
    w  = floor(2^44 * exp(logit - m))                              (fp32 subtract and exp; exact from there, int64)
    S  = sum of w
    r  = first 64-bit output of Philox4x64-10 with key (seed mod 2^64, 0) and counter (num_output + 1, 0, 0, 0)
    t  = floor(r * S / 2^64)                                       (u = r / 2^64 is the uniform number in [0, 1))
    token = the lowest id i with w[0] + ... + w[i] > t

As t < S, a token with w = 0 is never taken. Integer sums do not depend on their order, so the token depends neither on
the batch nor on columns left out because their w is 0. Implementations can differ only by the last bit of exp: where u
lies within that bit of a step of the CDF. Tokens less likely than the most likely one by a factor of 2^44 have w = 0.
Rows of up to 2^19 - 1 columns cannot overflow.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from array_api_compat import array_namespace, device

from ridgeline.core.arrays import Array

_WEIGHT_ONE = 2.0**44
MAX_COLUMNS = 2**19 - 1
_BLOCK = 2048  # columns summed together: the CDF of the blocks says which one to look into
_WORD = 2**64
_PHILOX_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_PHILOX_INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def random_word(seed: int, num_output: int) -> int:
    """Return the 64 random bits that decide token number `num_output` of a sequence.

    Python's integers do it in a third of the time that numpy takes to make a generator for one number.
    """
    low, high, key_low, key_high = (num_output + 1) % _WORD, (num_output + 1) // _WORD, seed % _WORD, 0
    other_low, other_high = 0, 0
    for _ in range(10):
        product, other_product = _PHILOX_MULTIPLIERS[0] * low, _PHILOX_MULTIPLIERS[1] * other_low
        low, high = other_product >> 64 ^ high ^ key_low, other_product % _WORD
        other_low, other_high = product >> 64 ^ other_high ^ key_high, product % _WORD
        key_low, key_high = (key_low + _PHILOX_INCREMENTS[0]) % _WORD, (key_high + _PHILOX_INCREMENTS[1]) % _WORD
    return low


def integer_weights(logits_RV: Array) -> Array:
    """Return unnormalized probabilities, int64 [R, V], the largest 2^44; meaningless where that logit is not finite."""
    assert logits_RV.shape[1] <= MAX_COLUMNS, "the sum of the weights would not fit in 63 bits"
    xp = array_namespace(logits_RV)
    shifted_RV = logits_RV - xp.max(logits_RV, axis=-1, keepdims=True)
    weights_RV = xp.exp(shifted_RV)
    weights_RV *= _WEIGHT_ONE
    return xp.astype(weights_RV, xp.int64)


def random_sample(logits_RV: Array, words: list[int]) -> Array:
    """Sample a column of each row, int64 [R]; `words` as from `random_word`. Meaningless where no maximum is finite."""
    xp, place = array_namespace(logits_RV), device(logits_RV)
    weights_RV = integer_weights(logits_RV)
    num_rows, num_columns = weights_RV.shape
    whole = num_columns // _BLOCK * _BLOCK
    sums_RB = xp.sum(xp.reshape(weights_RV[:, :whole], (num_rows, whole // _BLOCK, _BLOCK)), axis=-1)
    rest_R1 = xp.sum(weights_RV[:, whole:], axis=-1, keepdims=True)
    cdf_RB = xp.cumulative_sum(xp.concat((sums_RB, rest_R1), axis=1), axis=-1, include_initial=True)
    totals: list[int] = cdf_RB[:, -1].tolist()
    targets = [word * total // _WORD for word, total in zip(words, totals)]
    target_R1 = xp.asarray(targets, dtype=xp.int64, device=place)[:, None]
    block_R1 = xp.count_nonzero(cdf_RB[:, 1:-1] <= target_R1, axis=-1, keepdims=True)
    columns_RC = xp.minimum(block_R1 * _BLOCK + xp.arange(min(_BLOCK, num_columns), device=place), num_columns - 1)
    within_RC = xp.cumulative_sum(xp.take_along_axis(weights_RV, columns_RC, axis=1), axis=-1)
    rest_R1 = target_R1 - xp.take_along_axis(cdf_RB, block_R1, axis=1)
    column_R = block_R1[:, 0] * _BLOCK + xp.count_nonzero(within_RC <= rest_R1, axis=-1)
    return xp.minimum(column_R, num_columns - 1)  # only a row that is not finite can point past its end
