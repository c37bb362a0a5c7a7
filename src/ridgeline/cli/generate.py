"""Continue a prompt with a model, streamed to the terminal."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli._model import sampling_params, show, stream, summary
from ridgeline.cli._options import Sampling, default_model, only_adapter, with_options
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, MissingModelError, RequestError

if TYPE_CHECKING:
    from ridgeline.core.params import SamplingParams
    from ridgeline.engine.llm import LLM
    from ridgeline.engine.outputs import CompletionOutput, RequestOutput

DEFAULT_PROMPT = "def read_lines(path):"
DEFAULT_MAX_TOKENS = 128


@with_options(
    without={"task", "max_itl_s", "max_itl_ratio", "scheduling_policy"},
    defaults={"max_tokens": f"{DEFAULT_MAX_TOKENS}, or what the context has room for"},
    after=["prompt"],
    default=default_model,
)
def generate(
    sampling: Sampling,
    config: EngineConfig,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="Text to continue; - reads it from standard input. Default: the head of a function."
        ),
    ] = None,
    prompt_option: Annotated[str | None, typer.Option("--prompt", "-p", help="The same as PROMPT.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with outputs, ids and times.")] = False,
) -> None:
    """Continue a prompt with a model: ridgeline generate MODEL "Once upon a time"

    The prompt and its continuation go to standard output as they come, one line of counts and speeds to standard error.
    """
    if prompt is not None and prompt_option is not None:
        raise RequestError(f"two prompts were given, {prompt!r} and --prompt {prompt_option!r}; give one")
    asked = prompt if prompt_option is None else prompt_option
    text = DEFAULT_PROMPT if asked is None else _standard_input() if asked == "-" else asked
    adapter = only_adapter(config)
    llm = _open(config, is_alone=asked is None)
    room = llm.engine.info.max_model_len - len(llm.engine.intake.encode(text))
    params = sampling_params(llm, sampling, max(1, min(DEFAULT_MAX_TOKENS, room)))
    if json:
        (output,) = llm.generate(text, params, adapter=adapter, use_tqdm=False)
        typer.echo(_as_json(output))
        _check(output.outputs)
        return
    outputs = [stream(llm, text, params, adapter)] if params.n == 1 else _collect(llm, text, params, adapter)
    typer.echo(summary(outputs), err=True)
    _check(outputs)


def _open(config: EngineConfig, *, is_alone: bool) -> "LLM":
    """Load the model. A prompt that stands in its place is told how to be one."""
    from ridgeline import LLM

    name = config.model.model
    try:
        return LLM.from_config(config.drafting())
    except MissingModelError as error:
        if not is_alone or "/" in name:
            raise
        line = f"ridgeline generate {default_model()} {shlex.quote(name[:200])}"
        reason = f"{name[:200]!r} is no model." if " " in name else str(error)
        raise MissingModelError(f"{reason} To continue it as a prompt: {line}") from error


def _collect(llm: "LLM", prompt: str, params: "SamplingParams", adapter: str | None) -> "list[CompletionOutput]":
    (output,) = llm.generate(prompt, params, adapter=adapter, use_tqdm=False)
    for completion in output.outputs:
        typer.echo(f"--- {completion.index + 1} of {len(output.outputs)}", err=True)
        show(f"{prompt}{completion.text}\n")
    return output.outputs


def _check(outputs: "list[CompletionOutput]") -> None:
    for output in outputs:
        if output.error is not None:
            raise EngineError(f"output {output.index + 1} broke off: {output.error}")


def _as_json(output: "RequestOutput") -> str:
    import msgspec

    return msgspec.json.encode(msgspec.to_builtins(output) | {"usage": msgspec.to_builtins(output.usage)}).decode()


def _standard_input() -> str:
    try:
        return typer.get_binary_stream("stdin").read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}", param="prompt") from error
