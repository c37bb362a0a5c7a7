"""Talk to a model in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli._compute import Compute, computes
from ridgeline.cli._model import (
    DEFAULT_MODEL,
    DtypeOption,
    MaxModelLen,
    MinP,
    Model,
    Seed,
    Temperature,
    TopK,
    TopP,
    open_llm,
    sampling_params,
    show,
)
from ridgeline.core.errors import ContextLengthError, EngineError, RequestError

if TYPE_CHECKING:
    from ridgeline.core.params import SamplingParams
    from ridgeline.engine.llm import LLM

Message = dict[str, str]
DEFAULT_ANSWER_TOKENS = 512


@computes
def chat(
    compute: Compute,
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System prompt, kept in front of the conversation.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one answer. Default: 512, or half of a shorter context.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    dtype: DtypeOption = "auto",
    max_model_len: MaxModelLen = None,
) -> None:
    """Talk to a model in the terminal: one line in, one answer out.

    /reset forgets the conversation, /exit or end of input leaves. When the conversation outgrows the context, its
    oldest exchanges are dropped, with a note; a single message that does not fit is refused.
    """
    llm = open_llm(model, dtype, max_model_len, compute)
    params = sampling_params(
        llm,
        max_tokens=max_tokens or min(DEFAULT_ANSWER_TOKENS, llm.engine.intake.max_model_len // 2),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    conversation = _Conversation(llm, params, opening, compute.only_adapter())
    while (line := _read_line()) is not None and line.strip() != "/exit":
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip():
            conversation.say(line)


class _Conversation:
    """The messages so far: those of `opening`, which are never dropped, then user and assistant in turn."""

    def __init__(self, llm: "LLM", params: "SamplingParams", opening: list[Message], adapter: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = opening
        self._adapter = adapter
        self._turns: list[Message] = []
        self._template = llm.chat_template()

    def reset(self) -> None:
        self._turns.clear()

    def say(self, text: str) -> None:
        """Streams the answer to `text`; a message that does not fit is refused and the conversation stays as it was."""
        turns = [*self._turns, {"role": "user", "content": text}]
        try:
            num_dropped, prompt_ids = self._fit(turns)
        except ContextLengthError as error:
            typer.echo(str(error), err=True)
            return
        if num_dropped:
            typer.echo(f"[the context is full: the oldest {num_dropped} messages were dropped]", err=True)
        answer = ""
        for delta in self._llm.stream(prompt_ids, self._params, adapter=self._adapter):
            show(delta.text)
            answer += delta.text
            if delta.finish is not None and delta.finish.error is not None:
                raise EngineError(f"the answer broke off: {delta.finish.error}")
        show("\n")
        self._turns = [*turns[num_dropped:], {"role": "assistant", "content": answer}]

    def _fit(self, turns: list[Message]) -> tuple[int, list[int]]:
        """(messages dropped from the start, prompt ids), such that prompt and answer fit the context."""
        intake, max_tokens = self._llm.engine.intake, self._params.max_tokens or 1
        num_dropped = 0
        while True:
            text = self._template.render([*self._opening, *turns[num_dropped:]])
            prompt_ids = intake.encode(text, add_special_tokens=False)
            if len(prompt_ids) + max_tokens <= intake.max_model_len:
                return num_dropped, prompt_ids
            if num_dropped == len(turns) - 1:
                raise ContextLengthError(
                    f"the message does not fit: with it the prompt has {len(prompt_ids)} tokens and the answer may "
                    f"have {max_tokens}, but the context is {intake.max_model_len}; shorten it or lower --max-tokens"
                )
            num_dropped += 2


def _read_line() -> str | None:
    """The next line of standard input without its end, None at the end of input."""
    try:
        if sys.stdin.isatty():
            return input("> ")
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}", param="messages") from error
