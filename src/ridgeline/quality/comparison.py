"""Compare two models on the same texts: exact KL over the whole vocabulary, and errors from documents in pairs."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.core.dtypes import Float32s
from ridgeline.quality.texts import Document

Floats = npt.NDArray[np.float64]
Level = Literal["transparent", "near", "standard", "beyond"]

BITS = 1 / math.log(2)
QUANTILES = (0.5, 0.99, 0.999, 1.0)
# The upper end of the 95 % interval of the mean KL, bits per token, that each level of quality allows.
LEVELS: dict[Level, float] = {"transparent": 0.001, "near": 0.01, "standard": 0.05}
TOKENS_FOR_A_VERDICT = 50_000
MAX_SHARE_OF_ONE = 0.9  # share of the tokens that one document may have of those that say how much documents differ


class TokenScores(NamedTuple):
    """Holds what two models say of T tokens: natural log-probabilities, KL(base || model) in nats, agreement."""

    logprob_T: Floats
    base_logprob_T: Floats
    kl_T: Floats
    agrees_T: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds a mean, and its standard error from documents in pairs; NaN where one is nearly all of the text."""

    mean: float
    standard_error: float

    @property
    def upper(self) -> float:
        """The upper end of the 95 % interval."""
        return self.mean + 1.96 * self.standard_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares a model with its base on the same tokens. KL is KL(base || model), in bits per token."""

    num_documents: int
    num_tokens: int
    num_bytes: int
    bits_per_byte: float
    base_bits_per_byte: float
    bits_per_byte_above_base: Estimate
    perplexity: float
    base_perplexity: float
    kl: Estimate
    kl_quantiles: dict[str, float]
    top1_agreement: Estimate
    probability_change_rms: float  # of the text's own tokens

    @property
    def level(self) -> Level | None:
        """The level of quality that the upper end of the KL's interval keeps; None on a text too short to say."""
        if self.num_tokens < TOKENS_FOR_A_VERDICT or math.isnan(self.kl.upper):
            return None
        for level, most in LEVELS.items():
            if self.kl.upper <= most:
                return level
        return "beyond"


def score_tokens(logits_TV: Float32s, base_TV: Float32s, next_T: npt.NDArray[np.int64]) -> TokenScores:
    """Return the scores of the tokens `next_T`. Sums are float64's: a small KL is the sum of large terms.

    KL(p || q) = sum p (x - y) - (log Z_p - log Z_q), of logits less their largest.
    """
    (q_TV, log_z_T), (p_TV, base_log_z_T) = map(_shifted, (logits_TV, base_TV))
    rows = np.arange(len(next_T))
    # What the base rules out adds nothing, whatever the model says of it.
    difference_TV = np.subtract(p_TV, q_TV, out=np.zeros_like(p_TV), where=p_TV > -np.inf)
    difference_TV *= np.exp(p_TV)
    kl_T = difference_TV.sum(1, dtype=np.float64) / np.exp(base_log_z_T) - (base_log_z_T - log_z_T)
    agrees_T = q_TV.argmax(1) == p_TV.argmax(1)
    return TokenScores(q_TV[rows, next_T] - log_z_T, p_TV[rows, next_T] - base_log_z_T, kl_T, agrees_T)


def _shifted(logits_TV: Float32s) -> tuple[Float32s, Floats]:
    """Return logits less the largest of each row, and the logarithm of the sum of their exponentials."""
    x_TV = logits_TV - logits_TV.max(1, keepdims=True)
    return x_TV, np.log(np.exp(x_TV).sum(1, dtype=np.float64))


Logits = Callable[[Sequence[int]], Iterator[Float32s]]


def compare(
    documents: Sequence[Document], model: Logits, base: Logits | None, report: Callable[[int], None]
) -> Comparison:
    """Compute both models on every document, side by side; `report` is told the tokens done. `base` None: the model.

    Both give the logits of a window in the same chunks.
    """
    found: list[TokenScores] = []
    done = 0
    for document in documents:
        parts: list[TokenScores] = []
        for window in document.windows:
            for scores in _window_scores(window, model, base):
                parts.append(scores)
                done += len(scores.kl_T)
                report(done)
        found.append(_together(parts))
    return _summary(documents, found)


def _together(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(*map(np.concatenate, zip(*parts)))


def _window_scores(window: Sequence[int], model: Logits, base: Logits | None) -> Iterable[TokenScores]:
    inputs, targets = window[:-1], np.asarray(window[1:])
    start = 0
    pairs = ((each, each) for each in model(inputs)) if base is None else zip(model(inputs), base(inputs), strict=True)
    for logits_TV, base_TV in pairs:
        yield score_tokens(logits_TV, base_TV, targets[start : start + len(logits_TV)])
        start += len(logits_TV)


def _summary(documents: Sequence[Document], found: Sequence[TokenScores]) -> Comparison:
    num_bytes = [document.num_bytes for document in documents]
    num_tokens = [document.num_tokens for document in documents]
    bits = [-BITS * float(scores.logprob_T.sum()) for scores in found]
    base_bits = [-BITS * float(scores.base_logprob_T.sum()) for scores in found]
    every = _together(found)
    change_T = np.exp(every.logprob_T) - np.exp(every.base_logprob_T)
    return Comparison(
        num_documents=len(found),
        num_tokens=sum(num_tokens),
        num_bytes=sum(num_bytes),
        bits_per_byte=sum(bits) / sum(num_bytes),
        base_bits_per_byte=sum(base_bits) / sum(num_bytes),
        bits_per_byte_above_base=ratio(np.subtract(bits, base_bits), num_bytes),
        perplexity=2 ** (sum(bits) / sum(num_tokens)),
        base_perplexity=2 ** (sum(base_bits) / sum(num_tokens)),
        kl=ratio([BITS * float(scores.kl_T.sum()) for scores in found], num_tokens),
        kl_quantiles={f"{quantile:g}": float(np.quantile(BITS * every.kl_T, quantile)) for quantile in QUANTILES},
        top1_agreement=ratio([float(scores.agrees_T.sum()) for scores in found], num_tokens),
        probability_change_rms=float(np.sqrt(np.mean(change_T**2))),
    )


def ratio(sums: Sequence[float] | Floats, sizes: Sequence[int]) -> Estimate:
    """Return the ratio of two sums over documents, which are a sample: long ones differ by more than short ones."""
    d, n = np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    mean = float(d.sum() / n.sum())
    if n.max() > MAX_SHARE_OF_ONE * n.sum():  # nothing is left of it to differ from the mean
        return Estimate(mean, math.nan)
    residual = d - mean * n
    return Estimate(mean, math.sqrt(len(d) / (len(d) - 1) * float((residual**2).sum())) / float(n.sum()))
