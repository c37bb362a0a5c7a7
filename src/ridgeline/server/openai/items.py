"""Bodies of the Responses API, and the chats that they ask for: one request, one prompt, whichever API it came by."""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec

from ridgeline.core.errors import RequestError
from ridgeline.core.params import MAX_LOGPROBS
from ridgeline.server.openai import protocol
from ridgeline.server.openai.chat import CHAT_BODY
from ridgeline.server.openai.dialogue import text_of
from ridgeline.server.openai.fields import with_parameters
from ridgeline.server.openai.protocol import ChatMessage, FunctionFields, FunctionName, OutputConfig, SamplingFields

_NEEDED: Mapping[str, tuple[str, ...]] = {  # of each type of items
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
LOGPROBS = "message.output_text.logprobs"
CALLED = ("function", "custom")  # types of tools that the client runs; those of others are left out
_TEXTS = ("input_text", "output_text", "reasoning_text", "text", "refusal")


class Item(msgspec.Struct, kw_only=True):
    """Holds an item of the input; its type, a message by default, says which of the fields it has."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None


class AnyTool(FunctionFields, kw_only=True):
    """Describes a tool; as a choice names the one that must be called or, of type `allowed_tools`, those that may be.

    The `format` of a custom tool says what its input is, a text.
    """

    type: str
    name: FunctionName = ""
    format: "InputFormat | None" = None
    mode: Literal["auto", "required"] = "auto"
    tools: "list[AnyTool] | None" = None


class InputFormat(msgspec.Struct, kw_only=True):
    """Says what the input of a custom tool is."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


class ResponsesRequest(SamplingFields, forbid_unknown_fields=False, kw_only=True):
    """POST /v1/responses."""

    NEUTRAL: ClassVar[protocol.Neutral] = {
        **SamplingFields.NEUTRAL,
        **dict.fromkeys(("conversation", "prompt", "moderation", "max_tokens", "response_format"), ()),
        **dict.fromkeys(("logprobs", "prompt_logprobs"), ()),
        **dict.fromkeys(("background", "return_token_ids"), (False,)),
        "n": (1,),
    }

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | AnyTool | None = None
    parallel_tool_calls: bool | None = None
    text: OutputConfig | None = None
    reasoning: OutputConfig | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    logprobs: Any = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None


RESPONSES_BODY = with_parameters(ResponsesRequest)
_COUNTED = [("input", str | list[Item] | None, None)]  # a conversation may go on without more
_COUNT = msgspec.defstruct("InputTokensRequest", _COUNTED, bases=(RESPONSES_BODY,), kw_only=True)
COUNT_BODY = cast("type[ResponsesRequest]", _COUNT)


def chat_of(body: ResponsesRequest, items: Sequence[Item]) -> protocol.ChatRequest:
    """Return the chat that a body asks for, whose conversation is `items`. Raises RequestError that names the field."""
    names = set(CHAT_BODY.__struct_fields__).intersection(body.__struct_fields__)
    form, choice = None if body.text is None else body.text.format, body.tool_choice
    if form is not None and form.type == "json_schema":
        form.json_schema = protocol.JsonSchemaFormat(schema=form.schema)  # where chat has it
    with_logprobs = LOGPROBS in (body.include or ())
    begun = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    values: dict[str, Any] = {
        **{name: getattr(body, name) for name in names},
        "messages": [*begun, *_joined(_message(item, f"input[{index}]") for index, item in enumerate(items))],
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or []) if tool.type in CALLED],
        "tool_choice": _choice(choice) if isinstance(choice, AnyTool) else choice,
        "response_format": form,
        "logprobs": with_logprobs,
        "top_logprobs": body.top_logprobs if with_logprobs else None,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    return CHAT_BODY(**values)


def listed(given: str | Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the items of an input as they are stored and listed: with ids, and content in parts."""
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        fields: dict[str, Any] = {"id": f"item_{uuid.uuid4().hex}", "type": "message", "status": "completed"}
        fields |= {name: value for name, value in item.items() if value is not None}
        if isinstance(text := item.get("content"), str):
            is_output = item.get("role") == "assistant"
            own = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
            fields["content"] = [{**own, "text": text}]
        yield fields


def _joined(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages, what the assistant wrote in a row as one."""
    for role, group in groupby(messages, key=lambda message: message.role):
        if role != "assistant":
            yield from group
            continue
        some = list(group)
        content = "\n".join(str(message.content) for message in some if message.content)
        thought = "".join(message.reasoning_content or "" for message in some)
        calls = [call for message in some for call in message.tool_calls or ()]
        yield ChatMessage(role="assistant", content=content, reasoning_content=thought, tool_calls=calls)


def _message(item: Item, where: str) -> ChatMessage:
    kind = item.type or "message"
    if kind not in _NEEDED:
        raise _unsupported(where, f"an item of type {kind[:40]!r}", ", ".join(_NEEDED))
    if missing := [name for name in _NEEDED[kind] if getattr(item, name) is None]:
        raise RequestError(f"{where}: an item of type {kind!r} needs {' and '.join(missing)}", param=where)
    text = text_of(item.content or item.output or "", where, _TEXTS)
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.arguments or ""
        if kind == "custom_tool_call":
            arguments = msgspec.json.encode({"input": item.input}).decode()
        function = protocol.FunctionCall(name=item.name or "", arguments=arguments)
        call = protocol.ToolCall(id=item.call_id or "", type="function", function=function)
        return ChatMessage(role="assistant", tool_calls=[call])
    if kind in ("function_call_output", "custom_tool_call_output"):
        return ChatMessage(role="tool", content=text, tool_call_id=item.call_id)
    if kind == "reasoning":
        return ChatMessage(role="assistant", reasoning_content=text)
    return ChatMessage(role=item.role or "user", content=text)


def ignored_tools(body: ResponsesRequest) -> Iterator[str]:
    """Yield names of the tools that are left out, and of grammars of inputs that the model is only told of."""
    for tool in body.tools or ():
        if tool.type not in CALLED:
            yield f"tools.{tool.type}"
        elif tool.format is not None and tool.format.syntax == "lark":
            yield f"tools.{tool.name}.format"


def _choice(choice: AnyTool) -> protocol.ToolChoice:
    if choice.type != "allowed_tools":
        return protocol.ToolChoice(type="function", function=_tool(choice, "tool_choice").function)
    tools = [_tool(tool, "tool_choice") for tool in choice.tools or () if tool.type in CALLED]
    return protocol.ToolChoice(type="allowed_tools", allowed_tools=protocol.AllowedTools(mode=choice.mode, tools=tools))


def _tool(tool: AnyTool, where: str) -> protocol.Tool:
    """Return a tool as chat has it: a custom one is a function of a text, its `input`."""
    if tool.type not in CALLED:
        raise _unsupported(where, f"a tool of type {tool.type[:40]!r}", " and ".join(CALLED))
    if not tool.name:
        raise RequestError(f"{where}: a {tool.type} tool needs a name", param=where)
    fields = {name: getattr(tool, name) for name in FunctionFields.__struct_fields__}
    if tool.type == "custom":
        text: dict[str, Any] = {"type": "string"}
        if (form := tool.format) is not None and form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
        elif form is not None and form.syntax == "lark":
            fields["description"] = f"{tool.description or ''}\n\nGrammar of the input, in Lark:\n{form.definition}"
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
        fields |= {"parameters": schema, "strict": "pattern" in text}
    return protocol.Tool(type="function", function=FunctionFields(**fields))


def _unsupported(where: str, what: str, others: str) -> RequestError:
    return RequestError(f"{where}: {what} is not supported, only {others}", param=where, code="unsupported_field")
