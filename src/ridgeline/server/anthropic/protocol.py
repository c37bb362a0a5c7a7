"""Describe bodies of the Messages API. Agents add fields every week: unknown ones are ignored."""

from typing import Annotated, Any, Literal

import msgspec

from ridgeline.server.openai.protocol import FunctionName, OutputConfig, ResponseFormat

TAKEN = frozenset(  # fields that change nothing here, and need not be named
    ("cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "speed")
)


class Block(msgspec.Struct, kw_only=True):
    """Holds a content block; its type says which of the fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None


class MessageTurn(msgspec.Struct, kw_only=True):
    """Holds one message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolFields(msgspec.Struct, kw_only=True):
    """Describes a tool, which is run by the client unless it has a type other than custom."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Says whether tools may, must or must not be called; `name` is of the one that must be."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingFields(msgspec.Struct, kw_only=True):
    """Says whether the model reasons first. The budget is a hint, and no bound here."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024)] | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    messages: list[MessageTurn]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolFields] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None  # the name in older betas of what output_config has as `format`
    container: Any = None
    mcp_servers: Any = None


class MessagesRequest(PromptFields, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
