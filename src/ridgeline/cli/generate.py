"""Continue a prompt with a model, streamed to the terminal."""

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
    Stop,
    Temperature,
    TopK,
    TopP,
    open_llm,
    sampling_params,
    show,
    summary,
)
from ridgeline.core.errors import EngineError, RequestError

if TYPE_CHECKING:
    from ridgeline.core.params import SamplingParams
    from ridgeline.engine.llm import LLM
    from ridgeline.engine.outputs import CompletionOutput, RequestOutput

DEFAULT_PROMPT = "def read_lines(path):"


@computes
def generate(
    compute: Compute,
    prompt: Annotated[
        str,
        typer.Argument(
            help="The text to continue; - reads it from standard input.", show_default="the head of a function"
        ),
    ] = DEFAULT_PROMPT,
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    n: Annotated[
        int, typer.Option("--n", "-n", help="Answers to generate; several are printed when all are done.")
    ] = 1,
    stop: Stop = None,
    dtype: DtypeOption = "auto",
    max_model_len: MaxModelLen = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the answers, ids and times.")
    ] = False,
) -> None:
    """Continue a prompt with a model.

    The prompt and its continuation go to standard output as they come, one line of counts and speeds to standard error.
    """
    text, adapter = _standard_input() if prompt == "-" else prompt, compute.only_adapter()
    llm = open_llm(model, dtype, max_model_len, compute)
    params = sampling_params(
        llm,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        n=n,
        stop=stop,
    )
    if json:
        (output,) = llm.generate(text, params, adapter=adapter, use_tqdm=False)
        typer.echo(_as_json(output))
        _check(output.outputs)
        return
    answers = [_stream(llm, text, params, adapter)] if n == 1 else _collect(llm, text, params, adapter)
    typer.echo(summary(answers), err=True)
    _check(answers)


def _stream(llm: "LLM", prompt: str, params: "SamplingParams", adapter: str | None) -> "CompletionOutput":
    from ridgeline.engine.outputs import CompletionOutput

    answer = CompletionOutput(0)
    unshown = prompt  # shown once the engine has accepted it
    for delta in llm.stream(prompt, params, adapter=adapter):
        show(unshown + delta.text)
        unshown = ""
        answer.extend(delta)
    show("\n")
    return answer


def _collect(llm: "LLM", prompt: str, params: "SamplingParams", adapter: str | None) -> "list[CompletionOutput]":
    (output,) = llm.generate(prompt, params, adapter=adapter, use_tqdm=False)
    for answer in output.outputs:
        typer.echo(f"--- {answer.index + 1} of {len(output.outputs)}", err=True)
        show(f"{prompt}{answer.text}\n")
    return output.outputs


def _check(answers: "list[CompletionOutput]") -> None:
    for answer in answers:
        if answer.error is not None:
            raise EngineError(f"answer {answer.index + 1} broke off: {answer.error}")


def _as_json(output: "RequestOutput") -> str:
    import msgspec

    return msgspec.json.encode(msgspec.to_builtins(output) | {"usage": msgspec.to_builtins(output.usage)}).decode()


def _standard_input() -> str:
    try:
        return typer.get_binary_stream("stdin").read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}", param="prompt") from error
