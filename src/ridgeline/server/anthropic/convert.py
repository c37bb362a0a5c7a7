"""Make a chat of a body of the Messages API: one request, one prompt, whichever API it came by."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from ridgeline.core.errors import RequestError
from ridgeline.server.anthropic.protocol import (
    TAKEN,
    Block,
    MessagesRequest,
    MessageTurn,
    PromptFields,
    ToolChoice,
    ToolFields,
)
from ridgeline.server.openai import protocol as openai
from ridgeline.server.openai.chat import CHAT_BODY

CALL_PREFIX = "toolu_"  # of ids; some templates insist on what stands behind it
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {  # the blocks of a role, and what each must have
    "system": {"text": ("text",)},
    "user": {"text": ("text",), "tool_result": ("tool_use_id",)},
    "assistant": {"text": ("text",), "thinking": (), "redacted_thinking": (), "tool_use": ("id", "name")},
}


def chat_of(body: PromptFields) -> openai.ChatRequest:
    """Return the chat that a body asks for. Raises RequestError that names the field."""
    for name in ("container", "mcp_servers"):
        if getattr(body, name):
            raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported_field")
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    form = (None if body.output_config is None else body.output_config.format) or body.output_format
    choice = body.tool_choice or ToolChoice(type="auto")
    system = [] if body.system is None else [MessageTurn(role="system", content=body.system)]
    shared = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
    values: dict[str, Any] = {
        **{name: getattr(body, name, None) for name in shared},
        "stop": getattr(body, "stop_sequences", None),
        "messages": [*_messages(system, "system"), *_messages(body.messages, "messages[{}].content")],
        "tools": [_tool(tool) for tool in body.tools or () if tool.type in (None, "custom")],
        "tool_choice": _CHOICES.get(choice.type)
        or openai.ToolChoice(type="function", function=openai.FunctionFields(name=choice.name or "")),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
        "reasoning_effort": "xhigh" if effort == "max" else effort,
        "response_format": form,
        "continue_final_message": bool(body.messages) and body.messages[-1].role == "assistant",
    }
    if form is not None:
        form.json_schema = openai.JsonSchemaFormat(schema=form.schema)  # where OpenAI has it
    return CHAT_BODY(**values)


def ignored_names(values: Mapping[str, Any], body: PromptFields) -> list[str]:
    """Return the names of what a body has that changes nothing although it should."""
    names = [name for name in values if name not in TAKEN.union(MessagesRequest.__struct_fields__)]
    names += [f"tools.{tool.name}" for tool in body.tools or () if tool.type not in (None, "custom")]
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        names.append("thinking.budget_tokens")
    return names


def _tool(tool: ToolFields) -> openai.Tool:
    function = openai.FunctionFields(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return openai.Tool(type="function", function=function)


def _messages(turns: Sequence[MessageTurn], place: str) -> Iterator[openai.ChatMessage]:
    """Yield the messages of chat; neighbours of one role are one message. Raises RequestError."""
    called: set[str] = set()
    for role, group in groupby(enumerate(turns), key=lambda turn: turn[1].role):
        texts, thoughts, calls = list[str](), list[str](), list[openai.ToolCall]()
        for where, block in (part for i, turn in group for part in _blocks(role, turn.content, place.format(i))):
            call_id = (block.id or block.tool_use_id or "").removeprefix(CALL_PREFIX)
            if block.type == "text":
                texts.append(block.text or "")
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type == "tool_use":
                called.add(call_id)
                arguments = msgspec.json.encode(block.input or {}).decode()
                function = openai.FunctionCall(name=block.name or "", arguments=arguments)
                calls.append(openai.ToolCall(id=call_id, type="function", function=function))
            elif block.type == "tool_result":
                if call_id not in called:
                    what = f"must be of a tool_use in an earlier message, got {call_id[:64]!r}"
                    raise RequestError(f"{where}.tool_use_id {what}", param=where)
                parts = _blocks("system", block.content or "", f"{where}.content")
                content = "\n".join(part.text or "" for _, part in parts)
                yield openai.ChatMessage(role="tool", content=content, tool_call_id=call_id)
        if texts or role == "assistant":
            content, thought = "\n".join(texts), "".join(thoughts)
            kind = "assistant" if role == "assistant" else "system" if role == "system" else "user"
            yield openai.ChatMessage(role=kind, content=content, reasoning_content=thought, tool_calls=calls)


def _blocks(role: str, content: str | Sequence[Block], where: str) -> Iterator[tuple[str, Block]]:
    """Yield the blocks of a content, each with where it stands. Raises RequestError for one that cannot stand there."""
    blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
    for index, block in enumerate(blocks):
        place = where if isinstance(content, str) else f"{where}[{index}]"
        needed = _NEEDED[role].get(block.type)
        kind = repr(block.type[:40])
        if needed is None:
            what = f"a block of type {kind} is not supported here, only {', '.join(_NEEDED[role])}"
            raise RequestError(f"{place}: {what}", param=place, code="unsupported_field")
        if missing := [name for name in needed if getattr(block, name) is None]:
            raise RequestError(f"{place}: a block of type {kind} needs {' and '.join(missing)}", param=place)
        yield place, block
