"""Turn request fields into SamplingParams, and refuse fields that cannot be honoured. No torch, no engine."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from ridgeline.core.errors import RequestError
from ridgeline.core.options import table
from ridgeline.core.params import MAX_LOGIT_BIAS, MAX_STOP_CHARS, DiffusionParams, SamplingParams, SpeculationParams
from ridgeline.engine.intake import default_params
from ridgeline.server.openai.protocol import ChatMessage, SamplingFields, UsageChunks
from ridgeline.server.openai.structured import structured_outputs
from ridgeline.server.service import Service
from ridgeline.text.tokenizer import Tokenizer

Body = TypeVar("Body", bound=SamplingFields)
_NUMBER = re.compile("-?[0-9]{1,20}")
_WRITTEN: Mapping[str, Any] = {"logit_bias": dict[str, float]}  # where JSON has another type
_PARTS = [  # the same types in all bodies
    (part, msgspec.defstruct(f"{part}_fields", rows, kw_only=True, forbid_unknown_fields=True) | None, None)
    for part in ("diffusion", "structured_outputs")
    for rows in [[(row.field, row.type | None, None) for row in table(SamplingParams) if row.part == part]]
]


def with_parameters(request: type[Body]) -> type[Body]:
    """Add to a request body the fields in its NEUTRAL, and the parameters of SamplingParams that it does not declare.

    Their ranges are checked by SamplingParams; null is the same as absent.
    """
    rows = [row for row in table(SamplingParams) if row.part is None and row.field not in request.__struct_fields__]
    fields = [(row.field, _WRITTEN.get(row.field, row.type) | None, None) for row in rows]
    neutral = [(name, Any, None) for name in request.NEUTRAL]
    added = [*fields, *_PARTS, *neutral]
    made = msgspec.defstruct(request.__name__, added, bases=(request,), kw_only=True)
    return cast("type[Body]", made)


def refuse_unsupported(fields: SamplingFields | ChatMessage, where: str = "") -> None:
    """Raise RequestError for the first field with a value that would change the output if it were honoured."""
    for name, neutral in fields.NEUTRAL.items():
        value = getattr(fields, name)
        # == alone would let 0 pass for False
        if value is not None and not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            message = f"{where}{name} with this value is not supported; leave it out"
            raise RequestError(message, param=f"{where}{name}", code="unsupported_field")


def sampling_params(fields: SamplingFields, service: Service, **own: int | None) -> SamplingParams:
    """Return `own`, else what fields say, else generation_config.json, else the API. Raises RequestError."""
    values = msgspec.structs.asdict(fields)
    given: dict[str, Any] = {row.field: values[row.field] for row in table(SamplingParams) if row.part is None}
    if given["allowed_token_ids"] == []:
        raise RequestError("allowed_token_ids is empty: nothing could be sampled", param="allowed_token_ids")
    given |= {**own, "logit_bias": _biases(values["logit_bias"] or {}, service.tokenizer)}
    for name, params in (("diffusion", DiffusionParams), ("speculation", SpeculationParams)):
        if (part := values[name]) is not None:
            fields_given = msgspec.structs.asdict(part).items()
            given[name] = params(**{key: value for key, value in fields_given if value is not None})
    given["structured_outputs"] = structured_outputs(fields)
    return default_params(service.info.generation, **given)


def max_prompt_tokens(asked: int | None, service: Service, max_tokens: int | None) -> int | None:
    """Return how many tokens of a prompt remain; None: all. -1: as there is room for."""
    most = service.info.max_model_len
    if asked is not None and (asked == 0 or asked > most):
        problem = f"truncate_prompt_tokens must be -1, or from 1 to {most}; got {asked}"
        raise RequestError(problem, param="truncate_prompt_tokens")
    return max(1, most - (1 if max_tokens is None else max_tokens)) if asked == -1 else asked


def explains(fields: SamplingFields, service: Service) -> bool:
    """Tell whether the response is to say where its time went. Raises RequestError where that cannot be."""
    if fields.explain and (fields.use_beam_search or not service.settings.explain):
        why = "of a beam search" if fields.use_beam_search else "by this server: it was started with --no-explain"
        raise RequestError(f"where the time of outputs went is not told {why}", param="explain")
    return bool(fields.explain)


def _biases(given: Mapping[str, float], tokenizer: Tokenizer | None) -> dict[int, float]:
    """Return biases by token id; a key that is no number is a text, and means each of its tokens."""
    found: dict[int, float] = {}
    for key, bias in given.items():
        ids = [int(key)] if _NUMBER.fullmatch(key) else []
        if not ids and tokenizer is not None and len(key) <= MAX_STOP_CHARS and len(given) <= MAX_LOGIT_BIAS:
            ids = tokenizer.encode(key, add_special_tokens=False)
        if not ids:
            raise RequestError(f"logit_bias: {key[:100]!r} is no token id, and no text of tokens", param="logit_bias")
        found |= dict.fromkeys(ids, bias)
    return found


def usage_chunks(fields: SamplingFields) -> UsageChunks:
    """Tell which chunks of a stream have token counts. Raises RequestError for stream options that make no sense."""
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not there for streams; use stream=false", param="prompt_logprobs")
    if options is None or not options.include_usage:
        return ""
    return "each" if options.continuous_usage_stats else "last"
