"""The OpenAI API as types: request bodies as they are decoded, responses and stream chunks as they are encoded.

Requests refuse unknown fields. For fields of the OpenAI API that Ridgeline cannot honour, NEUTRAL has the values that
ask for nothing beyond what it does: these and null are taken, any other is refused by name; see fields.py. Extensions
are spelled as in vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

# ---- requests

Neutral = Mapping[str, tuple[object, ...]]
_Name, _Text = Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[_Name, _Text], msgspec.Meta(max_length=16)]
FunctionName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.:-]{1,64}$")]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`include_usage`: one more chunk with the token counts before [DONE], or with `continuous_usage_stats` in each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SpeculationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How the request is drafted for; an extension. It lowers what the server does, and never raises it."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = None
    pool: bool | None = None


class PredictionFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text that the output is expected to be, mostly."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema as OpenAI wraps it; without `schema` any JSON value. It is followed whatever `strict` says."""

    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] = "schema"
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Says what a response must be; `schema` beside json_object is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """Says, where it is not a chat, what the text must be or how much effort it is worth."""

    format: ResponseFormat | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both request bodies have, beside the parameters of SamplingParams, which `with_parameters` adds."""

    NEUTRAL: ClassVar[Neutral] = {
        "store": (False, True),
        "service_tier": ("auto", "default", "flex", "scale", "priority", "fast"),
    }

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, msgspec.Meta(ge=-10, le=10)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    grammar: str | None = None
    user: str | None = None  # hints for the provider's own bookkeeping: taken, not used
    metadata: Metadata | None = None
    speculation: SpeculationFields | None = None
    explain: bool | None = None  # say where the time of the outputs went; an extension


class CompletionRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class FunctionFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Describes a function; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Offers a function to the model."""

    type: Literal["function"]
    function: FunctionFields


class AllowedTools(msgspec.Struct, kw_only=True):
    """Says which of the tools may be called and, with the mode `required`, that one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[Tool]


class ToolChoice(msgspec.Struct, kw_only=True):
    """Names the function that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionFields | None = None
    allowed_tools: AllowedTools | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """Calls a function; `arguments` is JSON text. A chunk has no name: it only goes on."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in a message. Chunks have the `index` of the call and, behind its first, nothing that is known already."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation; content parts may be of type text only.

    Clients add fields of their own, and send back messages of other servers: unknown ones are ignored here.
    """

    NEUTRAL: ClassVar[Neutral] = {"function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None


class ChatRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    NEUTRAL: ClassVar[Neutral] = {
        **SamplingFields.NEUTRAL,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "verbosity": ("low", "medium", "high"),
        "moderation": (),
    }

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: PredictionFields | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


# ---- responses

FinishName = Literal["stop", "length", "tool_calls"]
ObjectName = Literal["text_completion", "chat.completion", "chat.completion.chunk"]
UsageChunks = Literal["", "last", "each"]  # of a stream: those with token counts


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts of a request, over all prompts and outputs.

    In detail: `cached_tokens` of the prompt, which the prefix cache served; `reasoning_tokens` of the outputs, with the
    markers that end them, and of a prediction what was verified in a step: `accepted_prediction_tokens` and
    `rejected_prediction_tokens`.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Mapping[str, int]
    completion_tokens_details: Mapping[str, int]


class TimingsBody(msgspec.Struct, frozen=True):
    """Extends OpenAI's body: when things happened to one output, in milliseconds from the request's arrival in the
    engine. `draft_n`: drafted tokens that were verified, as llama.cpp counts them; only where there were any.
    """

    queue_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    latency_ms: float
    num_preemptions: int
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """Extends OpenAI's body: one candidate for a prompt position, as in vLLM."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct):
    """Aligned lists, one entry per token; the first prompt token of an echo has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class Choice(msgspec.Struct, kw_only=True):
    """Holds what every choice has, and every part of one in a chunk; the last has how it ended."""

    index: int
    finish_reason: FinishName | None = None
    stop_reason: str | int | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Choice, kw_only=True):
    """A choice, or what a chunk adds to it."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """One likely token: its `bytes`, joined over tokens, are the UTF-8 of the text."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, frozen=True):
    """The token that was chosen, and the likely ones beside it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the tokens of an output or chunk."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The message that the model has written."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None
    annotations: list[Any] = []  # of a search in the web, which there is not


class ChatDelta(msgspec.Struct, kw_only=True):
    """The part of the message that a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One choice when it is whole, with its `message`, or the `delta` that a chunk adds to it."""

    message: AssistantMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None


class CompletionBody(msgspec.Struct, kw_only=True):
    """A whole response of either API, or one message of its stream."""

    id: str
    object: ObjectName
    created: int
    model: str
    choices: Sequence[Choice]
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    usage: UsageBody | UnsetType | None = UNSET
    explain: msgspec.Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
