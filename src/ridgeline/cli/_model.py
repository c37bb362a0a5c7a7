"""`generate` and `chat` share this: their sampling parameters, and text for a terminal."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from ridgeline.cli._options import Sampling
from ridgeline.core.params import SamplingParams
from ridgeline.core.words import counted

if TYPE_CHECKING:
    from ridgeline.engine.llm import LLM
    from ridgeline.engine.outputs import CompletionOutput

_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def sampling_params(llm: "LLM", given: Sampling, max_tokens: int) -> SamplingParams:
    """Fill in what the model recommends where no option was given, and `max_tokens`. Raises RequestError."""
    from ridgeline.engine.intake import default_params

    return default_params(llm.engine.info.generation, **({"max_tokens": max_tokens} | given))


def show(text: str) -> None:
    """Write model text at once; on a terminal, control characters (a model's output is untrusted) are replaced."""
    typer.echo(text.translate(_CONTROLS) if sys.stdout.isatty() else text, nl=False)


def stream(llm: "LLM", prompt: str | list[int], params: SamplingParams, adapter: str | None) -> "CompletionOutput":
    """Show an output as it comes, and return it; a prompt of text is shown before it, once the engine has taken it."""
    from ridgeline.engine.outputs import CompletionOutput

    output, unshown = CompletionOutput(0), prompt if isinstance(prompt, str) else ""
    for delta in llm.stream(prompt, params, adapter=adapter):
        show(unshown + delta.text)
        unshown = ""
        output.extend(delta)
    show("\n")
    return output


def summary(outputs: "Sequence[CompletionOutput]") -> str:
    """Say counts and speeds in one line, e.g. "64 tokens in 0.82 s · 78.0 tokens/s · TTFT 21 ms · TPOT 12.7 ms".

    Several outputs, generated together, have the first TTFT and the mean TPOT.
    """
    num_tokens = sum(len(output.token_ids) for output in outputs)
    timings = [output.timings for output in outputs if output.timings]
    elapsed_s = max((timing.latency_s for timing in timings), default=0.0)
    parts = [
        f"{counted(num_tokens, 'token')} in {elapsed_s:.2f} s",
        f"{num_tokens / max(elapsed_s, 1e-9):.1f} tokens/s",
    ]
    if ttfts_s := [timing.ttft_s for timing in timings if timing.ttft_s is not None]:
        parts.append(f"TTFT {min(ttfts_s) * 1e3:.0f} ms")
    if tpots_s := [timing.tpot_s for timing in timings if timing.tpot_s is not None]:
        parts.append(f"TPOT {sum(tpots_s) / len(tpots_s) * 1e3:.1f} ms")
    return " · ".join(parts)
