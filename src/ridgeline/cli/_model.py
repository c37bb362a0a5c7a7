"""What `generate` and `chat` share: the options of a model and of sampling, and text for a terminal."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli._compute import Compute
from ridgeline.core.config import Dtype
from ridgeline.core.params import SamplingParams

if TYPE_CHECKING:
    from ridgeline.engine.llm import LLM
    from ridgeline.engine.outputs import CompletionOutput

DEFAULT_MODEL = "python-9m"

Model = Annotated[
    str, typer.Option("--model", "-m", help="A folder, a .gguf file, a bundled model's name or a hub id.")
]
Temperature = Annotated[
    float | None, typer.Option(help="0: always the most likely token. Default: what the model recommends, else 1.")
]
TopP = Annotated[float | None, typer.Option(help="Sample within the most likely tokens of this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample among this many most likely tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option(help="Leave out tokens below this fraction of the likeliest one.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text. May be given several times.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of weights, activations and KV cache.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest context in tokens. Default: what the model declares.")]

_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def open_llm(model: str, dtype: Dtype, max_model_len: int | None, compute: Compute) -> "LLM":
    """The model in this process. Raises ConfigError and ModelLoadError."""
    from ridgeline import LLM

    return LLM(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_dtype=compute.kv_dtype,
        quantize=compute.quantize,
        quantize_group_size=compute.quantize_group_size,
        quantize_zero_points=compute.quantize_zero_points,
        quantize_inputs=compute.quantize_inputs,
        quantize_embeddings=not compute.no_quantize_embeddings,
        backend=compute.backend,
        isa=compute.isa,
        deterministic=compute.deterministic,
        adapters=compute.adapters(),
    )


def sampling_params(llm: "LLM", **given: object) -> SamplingParams:
    """The model's recommended parameters, except where an option was given (is not None). Raises RequestError."""
    from ridgeline.engine.intake import default_params

    return default_params(llm.engine.generation, **given)


def show(text: str) -> None:
    """Writes model text at once; on a terminal, control characters (a model's output is untrusted) are replaced."""
    typer.echo(text.translate(_CONTROLS) if sys.stdout.isatty() else text, nl=False)


def summary(answers: "list[CompletionOutput]") -> str:
    """Counts and speeds in one line, e.g. "64 tokens in 0.82 s · 78.0 tokens/s · TTFT 21 ms · TPOT 12.7 ms".

    Of several answers, generated together: the first TTFT, the mean TPOT.
    """
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    timings = [answer.timings for answer in answers if answer.timings]
    elapsed_s = max((timing.latency_s for timing in timings), default=0.0)
    parts = [f"{num_tokens} tokens in {elapsed_s:.2f} s", f"{num_tokens / max(elapsed_s, 1e-9):.1f} tokens/s"]
    if ttfts_s := [timing.ttft_s for timing in timings if timing.ttft_s is not None]:
        parts.append(f"TTFT {min(ttfts_s) * 1e3:.0f} ms")
    if tpots_s := [timing.tpot_s for timing in timings if timing.tpot_s is not None]:
        parts.append(f"TPOT {sum(tpots_s) / len(tpots_s) * 1e3:.1f} ms")
    return " · ".join(parts)
