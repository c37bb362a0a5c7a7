"""One token from processed logits, by inverse CDF in integers. Called by the sampler; top_p uses the same weights.

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

import numpy as np
import torch
from torch import Tensor

_WEIGHT_ONE = 2.0**44
_ALL_ZERO = -31.0  # 2^44 * exp(-31) < 1
MAX_COLUMNS = 2**19 - 1
_WORD = 2**64


def random_word(seed: int, num_output: int) -> int:
    """The 64 random bits that decide token number `num_output` of a sequence."""
    # numpy steps the counter before its first output, hence the + 1 of the rule above.
    return int(np.random.Philox(key=seed % _WORD, counter=num_output).random_raw())


def integer_weights(logits_RV: Tensor) -> Tensor:
    """Unnormalized probabilities, int64 [R, V], 2^44 for the largest logit; meaningless where that is not finite."""
    assert logits_RV.shape[1] <= MAX_COLUMNS, "the sum of the weights would not fit in 63 bits"
    shifted_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    # Below _ALL_ZERO the weight is 0 anyway, and exp is slow on -inf and where its result is subnormal.
    return shifted_RV.clamp_(min=_ALL_ZERO).exp_().mul_(_WEIGHT_ONE).to(torch.int64)


def draw(logits_RV: Tensor, words: list[int]) -> Tensor:
    """Column drawn for each row, int64 [R]; `words` as from `random_word`. Meaningless where no maximum is finite."""
    cdf_RV = integer_weights(logits_RV).cumsum(-1)
    totals: list[int] = cdf_RV[:, -1].tolist()
    targets = [word * total // _WORD for word, total in zip(words, totals)]
    target_R1 = torch.tensor(targets, dtype=torch.int64, device=logits_RV.device).unsqueeze(1)
    column_R = torch.searchsorted(cdf_RV, target_R1, right=True).squeeze(1)
    return column_R.clamp_(max=logits_RV.shape[1] - 1)  # only a row that is not finite can point past its end
