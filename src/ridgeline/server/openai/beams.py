"""Check what a beam search is asked for with."""

from ridgeline.core.errors import RequestError
from ridgeline.core.params import MAX_LOGPROBS, SamplingParams
from ridgeline.server.openai.protocol import SamplingFields

MAX_BEAMS = MAX_LOGPROBS // 2


def beam_penalty(fields: SamplingFields, params: SamplingParams) -> float | None:
    """Return the length penalty where beams are asked for. Raises RequestError beside what beams do not have."""
    if not fields.use_beam_search:
        if fields.length_penalty is not None:
            raise RequestError("length_penalty needs use_beam_search=true", param="length_penalty")
        return None
    plain = SamplingParams()
    others = ("stop_strings", "structured_outputs", "logit_bias", "presence_penalty", "frequency_penalty")
    others = (*others, "repetition_penalty", "prompt_logprobs", "allowed_token_ids", "bad_words")
    unlike = [name for name in others if getattr(params, name) != getattr(plain, name)]
    for what in ["stream"] * bool(fields.stream) + unlike[:1]:
        raise RequestError(f"use_beam_search goes without {what}: leave one of them out", param="use_beam_search")
    if params.n > MAX_BEAMS:
        raise RequestError(f"n={params.n} beams; at most {MAX_BEAMS} are searched", param="n")
    return 1.0 if fields.length_penalty is None else fields.length_penalty
