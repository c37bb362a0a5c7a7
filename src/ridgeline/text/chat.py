"""Chat templates: a list of messages in, the prompt text of the model out.

Called by the front ends, off the event loop (a render may take MAX_RENDER_S of CPU). `ChatTemplate.render` is the one
place where a template runs, always in `sandbox.ChatSandbox`. Must not import torch or transformers.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jinja2

from ridgeline.core.errors import ConfigError, ModelLoadError, RequestError
from ridgeline.text.sandbox import BUDGET_KEY, ChatSandbox, RaisedError
from ridgeline.text.template_limits import Budget, RefusedError
from ridgeline.text.tokenizer import MAX_TEMPLATE_BYTES, Tokenizer

MAX_OUTPUT_CHARS = 4 * 2**20
NAMED = {path.stem: path for path in sorted(Path(__file__).with_name("templates").glob("*.jinja"))}
GIVE_ONE = f"--chat-template FILE, or the NAME of one: {', '.join(NAMED)}"
_OURS = ("messages", "tools", "add_generation_prompt")


class ChatTemplate:
    """Renders the chat templates of one model, compiled. From any thread; no state between renders."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile `sources` by name: "default" must be there, "tool_use", if there, is taken for requests with tools.

        Raises ModelLoadError for a template that does not compile, is too large or reaches for other files.
        """
        if "default" not in sources:
            raise ModelLoadError(f"no chat template is named 'default', only {sorted(sources)}; name one of them so")
        sandbox = ChatSandbox()
        self._templates = {name: _compile(sandbox, name, source) for name, source in sources.items()}
        self._special_tokens = dict(special_tokens)
        self.source = "\n".join(sources.values())

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Tell whether the arguments of calls in a conversation must be JSON texts: templates differ, and are tried."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
        turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            return "{'x'" in self.render(turns, add_generation_prompt=False)
        except RequestError:
            return True

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, source: str | None = None) -> "ChatTemplate | None":
        """Compile the templates of the tokenizer's folder, or `source` in their place; None if there are none."""
        sources = tokenizer.chat_templates if source is None else {"default": source}
        return cls(sources, tokenizer.special_tokens) if sources else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        Encode it with add_special_tokens=False: the template writes its own. `variables` are further ones for
        the template, e.g. {"enable_thinking": False}. It sees copies of plain JSON data and nothing else.

        Raises RequestError (param "messages") when the template refuses the messages with raise_exception, fails on
        them or goes over a limit; with the parameter's name for data that is not JSON.
        """
        values: dict[str, Any] = dict(self._special_tokens)
        for name, value in (variables or {}).items():
            if name in _OURS or name in self._special_tokens or not name.isidentifier():
                raise RequestError(f"the template variable {name!r} cannot be set", param="chat_template_kwargs")
            values[name] = _plain(value, "chat_template_kwargs")
        values["messages"] = _plain(messages, "messages")
        values["tools"] = _plain(tools, "tools")
        values["add_generation_prompt"] = add_generation_prompt
        values[BUDGET_KEY] = Budget()
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(values):
                num_chars += len(piece)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise RefusedError(f"writes more than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except RaisedError as error:
            raise RequestError(str(error), param="messages") from error
        except Exception as error:  # whatever an untrusted template does wrong is this request's error
            message = f"the chat template fails on these messages: {_reason(error)}"
            raise RequestError(message, param="messages") from error
        return "".join(pieces)


def read_template(name: str) -> str:
    """Read the Jinja text of a chat template, one that is here or a file. Raises ConfigError where it cannot be one."""
    path = NAMED.get(name, Path(name))
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"chat template {path} is larger than {MAX_TEMPLATE_BYTES} bytes; give a Jinja text file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        how = f"give a Jinja text file, or one of {', '.join(NAMED)}"
        raise ConfigError(f"chat template {path} cannot be read: {error}; {how}") from error


def _compile(sandbox: ChatSandbox, name: str, source: str) -> jinja2.Template:
    if len(source.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
        raise ModelLoadError(f"chat template {name!r} is larger than {MAX_TEMPLATE_BYTES} bytes")
    try:
        return sandbox.compile_template(source)
    except Exception as error:  # jinja2's errors, and Python's for code too deep or too long to compile
        line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        why = _reason(error)
        raise ModelLoadError(f"chat template {name!r} cannot be used{line}: {why}; fix the template") from error


def _reason(error: Exception) -> str:
    """Return an error's text for the caller; only its kind where it is not jinja2's: such texts can hold addresses."""
    if isinstance(error, (RefusedError, jinja2.UndefinedError, jinja2.TemplateSyntaxError)):
        return str(error)[:300]
    return type(error).__name__


def _plain(value: Any, param: str, depth: int = 0) -> Any:
    """Copy `value` as JSON types alone: objects with methods of their own stay out of the template's reach."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > 64:
        raise RequestError(f"{param} is nested more than 64 deep", param=param)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        if all(type(key) is str for key, _ in items):
            return {key: _plain(item, param, depth + 1) for key, item in items}
    elif isinstance(value, (list, tuple)):
        return [_plain(item, param, depth + 1) for item in cast("Sequence[Any]", value)]
    raise RequestError(f"{param} must be plain JSON data, got a {type(value).__name__}", param=param)
