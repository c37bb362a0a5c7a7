"""Measure what quantization and other options cost a model in quality."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.cli._options import parse_pairs, with_options
from ridgeline.cli._tables import counting
from ridgeline.core.config import EngineConfig

if TYPE_CHECKING:
    from ridgeline.quality.evaluation import Evaluation

# Options that change no number of a text that is scored alone.
WITHOUT = {
    "task", "max_model_len", "prefix_caching", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens",
    "scheduling_policy", "max_itl_s", "max_itl_ratio", "speculate", "num_speculative_tokens",
    "adaptive_speculation", "prompt_lookup_min", "prompt_lookup_max", "pack_cache", "seed",
}  # fmt: skip


@with_options(without=WITHOUT)
def evaluate(
    config: EngineConfig,
    base: Annotated[
        str | None, typer.Option(help="The model to compare with, of the same vocabulary. Default: MODEL itself.")
    ] = None,
    base_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="An option of the base, such as kv_dtype=int8. Default: dtype=float32."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="A held-out text, UTF-8; give several. Default: Python that ships here.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Number of tokens to score, spread over all texts.")] = 1 << 16,
    window: Annotated[int, typer.Option(min=2, help="Tokens that the model sees at most.")] = 1024,
    code: Annotated[int, typer.Option(min=0, help="Number of the texts' Python functions to complete and parse.")] = 0,
    store: Annotated[
        bool,
        typer.Option("--store", help="Measure 8-bit inputs beside 16-bit ones instead, and store it for auto to heed."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what quantization and other options cost a model in quality: ridgeline evaluate MODEL --quantize int4

    MODEL with its options, and a base in float32, say how likely every token of a text is. What differs is the cost:
    perplexity, bits per byte, KL(base || model) over the whole vocabulary, and how often both predict the same token.
    """
    from dataclasses import replace

    from ridgeline.quality.code import compare_code
    from ridgeline.quality.evaluation import base_config, store_input_cost
    from ridgeline.quality.evaluation import evaluate as evaluated
    from ridgeline.quality.texts import read_texts

    texts = read_texts(text or [])
    other = base_config(config, base, parse_pairs(EngineConfig, base_option or []))
    with counting(Console(stderr=True), "scoring tokens") as report:
        if store:
            found = store_input_cost(config, texts, window=window, max_tokens=tokens, report=report)
        else:
            found = evaluated(config, other, texts, window=window, max_tokens=tokens, report=report)
    if code:
        found = replace(found, code=compare_code(config, other, texts, code))
    if json:
        typer.echo(found.as_json().decode())
    else:
        show(Console(), found)


def show(console: Console, found: "Evaluation") -> None:
    """Print what was found for a person."""
    from ridgeline.quality.comparison import TOKENS_FOR_A_VERDICT

    figures, code = found.comparison, found.code
    console.print(
        f"{found.model.name} beside {found.base.name}: {figures.num_tokens:,} tokens, {figures.num_bytes:,} bytes, "
        f"{found.text}",
        highlight=False,
    )
    table = Table("", "model", "base", "difference", show_header=True)
    above, kl, top1 = figures.bits_per_byte_above_base, figures.kl, figures.top1_agreement
    table.add_row("weights", f"{found.model.weight_bytes / 1e6:.1f} MB", f"{found.base.weight_bytes / 1e6:.1f} MB", "")
    bits = f"{figures.bits_per_byte:.4f}", f"{figures.base_bits_per_byte:.4f}"
    table.add_row("bits per byte", *bits, f"{above.mean:+.5f} ± {above.standard_error:.5f}")
    table.add_row("perplexity", f"{figures.perplexity:.4f}", f"{figures.base_perplexity:.4f}", "")
    table.add_row("KL, bits per token", "", "", f"{kl.mean:.6f} ± {kl.standard_error:.6f}")
    for quantile, bits in figures.kl_quantiles.items():
        table.add_row(f"  {'largest' if quantile == '1' else f'{float(quantile):.1%} below'}", "", "", f"{bits:.5f}")
    table.add_row("same first choice", "", "", f"{top1.mean:.2%} ± {top1.standard_error:.2%}")
    table.add_row("change of probabilities, RMS", "", "", f"{figures.probability_change_rms:.5f}")
    if code is not None:
        total = code.num_functions
        table.add_row("functions that parse", f"{code.parsed}/{total}", f"{code.base_parsed}/{total}", "")
        table.add_row("  of which alone", f"{code.only_model}", f"{code.only_base}", f"{code.same_text} same text")
    console.print(table)
    unknown = f"no verdict below {TOKENS_FOR_A_VERDICT:,} tokens in several documents"
    console.print(f"quality: {found.level}" if found.level else unknown, highlight=False)
