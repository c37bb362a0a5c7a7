"""How tokens are decided. The executor calls `sampling.Sampler` before the model runs, for the rows that the backend
may sample within the step, and after it, for the tokens.

Every SampleRow goes through this one order, whatever else is in the batch:

    05 allowed              tokens that the output's grammar does not allow get -inf
    07 allowed_ids          tokens that are none of the request's allowed_token_ids get -inf
    10 logit_bias           add the request's bias
    15 banned_ids           the ids that the strategy forbids, as the mask of a diffusion model, get -inf
    17 bad_words            the token that would complete one of the request's bad words gets -inf
    20 min_tokens           while num_output < min_tokens, the stop ids get -inf
    30 repetition           tokens of prompt and output: logit / penalty if above 0, else logit * penalty
    40 presence_frequency   tokens of the output: logit - frequency_penalty * count - presence_penalty
    -- greedy rows (temperature 0) stop here and take the largest logit --
    50 top_k                keep the k largest
    60 temperature          logit / temperature
    70 min_p                keep probability >= min_p * the largest probability
    80 top_p                keep the fewest largest tokens whose probability sums to >= top_p
    -- then `random_sample` takes one token of what is left --

The outcome is that of vLLM V1's sampler (bias, min_tokens, penalties, temperature, min_p, top_k, top_p): temperature
and min_p keep the order of the tokens, so top_k gives the same set before them, and whatever follows works on k columns
instead of the whole vocabulary. Ties go to the lower token id everywhere. Reported log-probabilities are of the raw
model distribution, before any of this.

Rows that need none of 07 to 40 are sampled by a backend that can, in the same order and by the same rule
(native/kernels/sample/sample.h): the same tokens but where the last bit of exp decides.

A token depends on its logits, parameters, `seed` and `num_output` only: not on the batch, its order, chunking or
preemption.

Must not import engine or server.
"""
