"""Score a text with rounded and with exact keys and values, in a process of its own: python -m ridgeline.quality.canary

It reads a `Sample` as JSON and prints a `Verdict`, both in one line; it has the lowest priority. One model is in memory
at a time, and of a long text the end is compared: what is rounded adds up there.
"""

import os
import sys
from collections import deque

import msgspec
import numpy as np

from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import Float32s
from ridgeline.quality.comparison import BITS, score_tokens
from ridgeline.quality.scorer import Scorer

COMPARED_CHUNKS = 2  # of Scorer's, at the end


class Sample(msgspec.Struct):
    """Names a model with its options, the type of its cache, and a text in its tokens."""

    model: str
    options: dict[str, str | int | bool]
    kv_dtype: str
    token_ids: list[int]


class Verdict(msgspec.Struct):
    """Holds the mean KL of exact to rounded keys and values, bits per token, and the share of equal first choices."""

    num_tokens: int
    kl_bits: float
    top1_agreement: float


def compared(sample: Sample) -> Verdict:
    """Return what a sample says of rounding keys and values."""
    token_ids = sample.token_ids
    exact_TV, rounded_TV = (_end(sample, kv_dtype) for kv_dtype in ("auto", sample.kv_dtype))
    next_T = np.array(token_ids[len(token_ids) - len(exact_TV) + 1 :])
    scores = score_tokens(rounded_TV[:-1], exact_TV[:-1], next_T)
    return Verdict(len(next_T), BITS * float(scores.kl_T.mean()), float(scores.agrees_T.mean()))


def _end(sample: Sample, kv_dtype: str) -> Float32s:
    """Return the logits of the text's last tokens."""
    config = EngineConfig.of(sample.model, num_threads=1, kv_dtype=kv_dtype, **sample.options)
    chunks = (np.array(chunk) for chunk in Scorer(config, len(sample.token_ids)).logits(sample.token_ids))
    return np.concatenate(deque(chunks, maxlen=COMPARED_CHUNKS))


if __name__ == "__main__":
    os.nice(19)
    sys.stdout.buffer.write(msgspec.json.encode(compared(msgspec.json.decode(sys.stdin.buffer.read(), type=Sample))))
