"""Request fields -> SamplingParams, and the refusal of fields that cannot be honoured. No torch, no engine."""

from collections.abc import Mapping

import msgspec

from ridgeline.core.errors import RequestError
from ridgeline.core.params import DiffusionParams, SamplingParams
from ridgeline.engine.intake import default_params
from ridgeline.server.openai.protocol import DiffusionFields, SamplingFields, StreamOptions
from ridgeline.weights.folder import GenerationDefaults

MAX_PRIORITY = 2**31 - 1

# The values of each field that ask for nothing beyond what Ridgeline does; null is always one of them.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_options": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "moderation": (),
}
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "refusal": (),
    "audio": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "annotations": ([],),
}


def refuse_unsupported(fields: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]], where: str = "") -> None:
    """Raises RequestError for the first field with a value that would change the answer if it were honoured."""
    for name in fields.__struct_fields__:
        value = getattr(fields, name)
        if value is None or name not in neutral:
            continue
        # == alone would let 0 pass for False
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral[name]):
            raise RequestError(
                f"{where}{name} with this value is not supported; leave it out",
                param=f"{where}{name}",
                code="unsupported_field",
            )


def sampling_params(
    fields: SamplingFields,
    generation: GenerationDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Fields that are set, else the model's generation_config.json, else the API's defaults. Raises RequestError."""
    if fields.priority is not None and abs(fields.priority) > MAX_PRIORITY:
        raise RequestError(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
    return default_params(
        generation,
        n=fields.n,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=fields.logit_bias,
        seed=fields.seed,
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        diffusion=None if fields.diffusion is None else diffusion_params(fields.diffusion),
    )


def diffusion_params(fields: DiffusionFields) -> DiffusionParams:
    """Fields that are set, else the defaults. Raises RequestError."""
    given = {name: getattr(fields, name) for name in fields.__struct_fields__ if getattr(fields, name) is not None}
    return DiffusionParams(**given)


def include_usage(fields: SamplingFields) -> bool:
    """Whether a stream ends with a usage chunk. Raises RequestError for stream options that make no sense."""
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not there for streams; use stream=false", param="prompt_logprobs")
    if (options or StreamOptions()).include_obfuscation:
        raise RequestError("include_obfuscation is not supported; leave it out", param="stream_options")
    return options is not None and bool(options.include_usage)
