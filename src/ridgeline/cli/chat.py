"""Talk to a model in the terminal."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli._model import sampling_params, stream, summary
from ridgeline.cli._options import Sampling, default_chat_model, only_adapter, with_options
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ContextLengthError, EngineError, RequestError

if TYPE_CHECKING:
    from ridgeline.core.params import SamplingParams
    from ridgeline.engine.llm import LLM
    from ridgeline.engine.outputs import CompletionOutput
    from ridgeline.text.chat import ChatTemplate

Message = dict[str, str]
DEFAULT_MAX_TOKENS = 512


@with_options(
    without={"task", "max_itl_s", "max_itl_ratio", "scheduling_policy", "n", "logprobs", "prompt_logprobs"},
    default=default_chat_model,
    defaults={"max_tokens": f"{DEFAULT_MAX_TOKENS}, or half of a shorter context"},
)
def chat(
    sampling: Sampling,
    config: EngineConfig,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    quick: Annotated[
        str | None, typer.Option("--quick", "-q", metavar="MESSAGE", help="Reply to one message and exit.")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="Chat template: a Jinja file, or a name. Default: the model's own."),
    ] = None,
) -> None:
    """Talk to a model in the terminal: one message in, one reply out.

    /reset forgets the conversation, /exit or end of input leaves. When the conversation outgrows the context, its
    oldest exchanges are dropped, with a note; a single message that does not fit is refused.
    """
    from ridgeline import LLM
    from ridgeline.text.chat import read_template

    adapter = only_adapter(config)
    template = None if chat_template is None else read_template(chat_template)
    llm = LLM.from_config(config.drafting())
    params = sampling_params(llm, sampling, min(DEFAULT_MAX_TOKENS, max(1, llm.engine.info.max_model_len // 2)))
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    conversation = _Conversation(llm, params, llm.chat_template(template), opening, adapter)
    if quick is not None:
        typer.echo(summary([conversation.say(quick)]), err=True)
        return
    while (line := _read_line()) is not None and line.strip() != "/exit":
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip():
            try:
                conversation.say(line)
            except ContextLengthError as error:
                typer.echo(str(error), err=True)


@dataclass(slots=True)
class _Conversation:
    """The messages so far: those of `opening`, which are never dropped, then user and assistant in turn."""

    llm: "LLM"
    params: "SamplingParams"
    template: "ChatTemplate"
    opening: list[Message]
    adapter: str | None
    turns: list[Message] = field(default_factory=list[Message])

    def reset(self) -> None:
        self.turns.clear()

    def say(self, text: str) -> "CompletionOutput":
        """Stream the reply to `text`. Raises ContextLengthError for one that does not fit, and then forgets it."""
        turns = [*self.turns, {"role": "user", "content": text}]
        num_dropped, prompt_ids = self._fit(turns)
        if num_dropped:
            typer.echo(f"[the context is full: the oldest {num_dropped} messages were dropped]", err=True)
        output = stream(self.llm, prompt_ids, self.params, self.adapter)
        if output.error is not None:
            raise EngineError(f"the reply broke off: {output.error}")
        self.turns = [*turns[num_dropped:], {"role": "assistant", "content": output.text}]
        return output

    def _fit(self, turns: list[Message]) -> tuple[int, list[int]]:
        """Return (messages dropped from the start, prompt ids), such that prompt and reply fit the context."""
        intake, max_tokens = self.llm.engine.intake, self.params.max_tokens or 1
        num_dropped = 0
        while True:
            text = self.template.render([*self.opening, *turns[num_dropped:]])
            prompt_ids = intake.encode(text, add_special_tokens=False)
            if len(prompt_ids) + max_tokens <= intake.info.max_model_len:
                return num_dropped, prompt_ids
            if num_dropped == len(turns) - 1:
                raise ContextLengthError(
                    f"the message does not fit: with it the prompt has {len(prompt_ids)} tokens and the reply may "
                    f"have {max_tokens}, but the context is {intake.info.max_model_len}; shorten it or lower "
                    "--max-tokens"
                )
            num_dropped += 2


def _read_line() -> str | None:
    """Return the next line of standard input without its end, None at the end of input."""
    try:
        if sys.stdin.isatty():
            return input("> ")
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}", param="messages") from error
