"""From a conversation, with tools, to the model's prompt and to what its outputs may hold."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from ridgeline.core.errors import RequestError
from ridgeline.server.openai.fields import refuse_unsupported
from ridgeline.server.openai.protocol import ChatMessage, ChatRequest, Tool, ToolCall, ToolChoice
from ridgeline.server.service import Service
from ridgeline.text.chat import GIVE_ONE, ChatTemplate
from ridgeline.text.outputs import OutputFormat
from ridgeline.text.tools.forcing import calls_among_text, forced_calls, reasoning_before, thoughts_before
from ridgeline.text.tools.formats import INSTRUCTIONS

MAX_TOOLS = 128
_PARTS = ("text", "refusal")  # of an assistant's content; others have the first alone
_END_OF_TEXT = "\ue000"  # of private use: no template looks for it
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A prompt, and how its outputs are read.

    `calls` is the grammar of tool calls that an output must be, or may hold; `preamble` of what stands before that, or
    before what the request asks for.
    """

    prompt: str
    form: OutputFormat
    calls: str | None = None
    preamble: str = ""


def dialogue_of(service: Service, body: ChatRequest, *, constrained: bool) -> Dialogue:
    """Return the prompt of a chat. `constrained`: a grammar of the request's own says what the output is.

    Raises RequestError that names the field.
    """
    choice = body.tool_choice
    tools = {} if choice == "none" else _offered(body.tools or [])
    names, must_call = _chosen(choice, tools)
    calls = service.calls if tools or (service.calls is not None and service.calls.always) else None
    if tools and calls is None:
        raise RequestError("tools need a tool call parser: this server was started with none", param="tools")
    prompt = _prompt(service, body, tools)
    reasoning, tokenizer = service.reasoning, service.tokenizer
    is_open = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
    leads = constrained or must_call
    strict = not leads and (len(names) < len(tools) or any(tools[name].function.strict for name in names))
    grammar, preamble = None, ""
    if calls is not None and tokenizer is not None and (must_call or strict):
        functions = {name: tools[name].function for name in names}
        schemas = {name: (each.parameters or _NO_ARGUMENTS, bool(each.strict)) for name, each in functions.items()}
        is_named = isinstance(choice, ToolChoice) and choice.type == "function"
        parallel = body.parallel_tool_calls is not False and not is_named
        grammar = (forced_calls if must_call else calls_among_text)(calls, schemas, tokenizer, parallel=parallel)
    if calls is not None and calls.final and tokenizer is not None and (leads or strict):
        preamble = thoughts_before(calls, tokenizer, final=grammar is None)
    elif leads:
        if reasoning is None or tokenizer is None or prompt.rstrip().endswith(reasoning.end):
            reasoning = None  # a grammar begins with the first token
        else:
            preamble = reasoning_before(reasoning, calls, tokenizer, is_open=is_open)
    return Dialogue(prompt, OutputFormat(calls, tools, reasoning, is_open, leads), grammar, preamble)


def num_prompt_tokens(service: Service, body: ChatRequest) -> int:
    """Return how many tokens the prompt of a chat has. Raises what `dialogue_of` does."""
    service.require_model(body.model)
    dialogue = dialogue_of(service, body, constrained=False)
    return len(service.encode(dialogue.prompt, add_special_tokens=False))


def _prompt(service: Service, body: ChatRequest, tools: Mapping[str, Tool]) -> str:
    """Return the prompt of a chat, with tools and reasoning as the template has them."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        variables = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    variables |= body.chat_template_kwargs or {}
    listed = [msgspec.to_builtins(tool) for tool in tools.values()]
    prompted, continued = body.add_generation_prompt, body.continue_final_message
    return rendered(service, body.messages, prompted, variables, listed or None, continued)


def rendered(
    service: Service,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None,
    variables: Mapping[str, object] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continued: bool | None = False,
) -> str:
    """Return the prompt that the chat template makes of a conversation; `continued`: up to the end of its last text."""
    template = service.chat_template
    if template is None:
        raise RequestError(
            f"this model has no chat template: start the server with {GIVE_ONE}; or use /v1/completions",
            param="messages",
        )
    if not messages:
        raise RequestError("messages is empty: give at least one", param="messages")
    if len(messages) > (most := service.settings.max_messages):
        raise RequestError(f"at most {most} turns in one conversation, got {len(messages)}", param="messages")
    called: dict[str, str] = {}  # the names of functions, by the ids of their calls so far
    turns = [_message(message, f"messages[{index}].", called, template) for index, message in enumerate(messages)]
    if tools and "tools" not in template.source:
        told = INSTRUCTIONS.replace("$TOOLS", "\n".join(json.dumps(tool["function"]) for tool in tools))
        turns.insert(0, {"role": "system", "content": told})
    if continued:
        turns[-1] = _marked(turns[-1])
    opens = add_generation_prompt is not False and not continued
    prompt = template.render(turns, tools=tools, add_generation_prompt=opens, variables=variables)
    return prompt.rpartition(_END_OF_TEXT)[0] if continued else prompt


def _marked(turn: Mapping[str, object]) -> Mapping[str, object]:
    """Return a turn that the model continues, with a mark behind its text. Raises RequestError for another's."""
    if turn["role"] != "assistant" or not turn["content"] or "tool_calls" in turn:
        message = f"a last message of role {turn['role']} cannot be continued: only an assistant's text without calls"
        raise RequestError(message, param="continue_final_message")
    return {**turn, "content": f"{turn['content']}{_END_OF_TEXT}"}


def _offered(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Return the tools by name. Raises RequestError for too many, or two of one name."""
    offered = {tool.function.name: tool for tool in tools}
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    if len(offered) < len(tools):
        raise RequestError(f"tools has two functions of one name, among {', '.join(offered)}", param="tools")
    return offered


def _chosen(choice: str | ToolChoice | None, tools: Mapping[str, Tool]) -> tuple[Sequence[str], bool]:
    """Return the names of the tools that may be called, and whether one must be. Raises RequestError."""
    names, must_call = list(tools), choice == "required"
    if isinstance(choice, ToolChoice):
        allowed = choice.allowed_tools if choice.type == "allowed_tools" else None
        named = [choice.function] if allowed is None else [tool.function for tool in allowed.tools]
        names = [function.name for function in named if function is not None]
        must_call = allowed is None or allowed.mode == "required"
    if (must_call or isinstance(choice, ToolChoice)) and not (names and tools.keys() >= set(names)):
        asked = f"tool_choice asks for {names or 'a call'}, but tools has {list(tools)}"
        raise RequestError(asked, param="tool_choice")
    return names, must_call


def _message(message: ChatMessage, where: str, called: dict[str, str], template: ChatTemplate) -> Mapping[str, object]:
    """Convert a message for templates: text content, and `system` for what OpenAI now calls `developer`."""
    refuse_unsupported(message, where)
    role = "system" if message.role == "developer" else message.role
    is_lost = role == "tool" and message.tool_call_id not in called
    wrong = (
        ("role", role == "function", "must be 'tool', with a tool_call_id"),
        ("content", message.content is None and role != "assistant", "is missing"),
        ("tool_calls", bool(message.tool_calls) and role != "assistant", "are for the role assistant alone"),
        ("tool_call_id", is_lost, "must be of a call in an earlier message"),
    )
    for name, is_wrong, why in wrong:
        if is_wrong:
            raise RequestError(f"{where}{name} {why}, got {str(getattr(message, name))[:64]!r}", param=f"{where}{name}")
    thought = message.reasoning_content or message.reasoning
    calls = enumerate(message.tool_calls or ())
    converted: dict[str, object] = {
        "role": role,
        "content": text_of(message.content or "", f"{where}content", _PARTS if role == "assistant" else _PARTS[:1]),
        "name": message.name or called.get(message.tool_call_id or ""),
        "tool_call_id": message.tool_call_id,
        "tool_calls": [_call(call, f"{where}tool_calls[{i}].", called, template) for i, call in calls] or None,
        "reasoning_content": thought,
        "thinking": thought,
    }
    return {name: value for name, value in converted.items() if value is not None}


def _call(call: ToolCall, where: str, called: dict[str, str], template: ChatTemplate) -> Mapping[str, object]:
    """Convert a call in an earlier message: arguments are JSON text there, and an object for most templates."""
    text = call.function.arguments or "{}"
    try:
        arguments: object = json.loads(text)
    except (ValueError, RecursionError):
        arguments = text  # of a call that max_tokens cut off: what was sent may come back
    if not isinstance(arguments, dict | str) or call.id is UNSET or call.function.name is UNSET:
        raise RequestError(
            f"{where}function must have a name and, as arguments, the text of a JSON object, and the call an id; "
            f"got {text[:100]!r}",
            param=f"{where}function",
        )
    called[call.id] = call.function.name
    function = {"name": call.function.name, "arguments": text if template.takes_text_arguments else arguments}
    return {"id": call.id, "type": "function", "function": function}


def text_of(content: str | list[dict[str, Any]], where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Join text parts, of these types, by line breaks, as other servers do for templates that take plain text."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("refusal" if part.get("type") == "refusal" else "text")
        if part.get("type") not in kinds:
            kind = str(part.get("type"))[:40]
            raise RequestError(f"{where}: a part of type {kind!r} is not supported, only text", param=where)
        if not isinstance(text, str):
            raise RequestError(f"{where}: a text part has a type and a text", param=where)
        texts.append(text)
    return "\n".join(texts)
