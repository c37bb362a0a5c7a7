"""What rounding the inputs of integer matrices costs: the exact KL to the model in float32, for every width and group.

usage: python -m benchmarks.input_bits --model python-9m --text FILE [FILE...] [--tokens 8192] [--window 512]
                                       [--schemes int8 int4 int4-g32] [--planted] [--out FOLDER]

Windows of the text go through the model in float32, and through the same model with the weights of a scheme and the
inputs of its matrices rounded as the kernels round them: to 16 bits, and to 8 bits with a scale per token, or per token
and group. Both give the probability of every entry of the vocabulary, so that the KL is exact. A quantized checkpoint
counts as what its integers mean. With --planted a few channels of every norm and every gated layer are made 64 to 128
times as large, and the weights that read them as much smaller: the model in float32 stays what it is, but for its
inputs' outliers. Nothing here is a timing, so a busy machine does not matter.
"""

import argparse
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from benchmarks.common import save, text_parser
from rich.console import Console
from rich.table import Table

from ridgeline.backends.reference.dense import dense_logits
from ridgeline.backends.reference.rounding import InputRounding, with_rounded_inputs
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.bench.report import Report
from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import FLOAT32, Array
from ridgeline.engine.model import open_model
from ridgeline.program.op import Program
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.quality.comparison import BITS, TokenScores, ratio, score_tokens
from ridgeline.quality.texts import cut
from ridgeline.quant import dequantized_weights, quantized_names, scheme
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

SCHEMES = {"int8": ("int8", None), "int4": ("int4", 128), "int4-g32": ("int4", 32)}
BF16 = "bfloat16"  # what half the bits of everything cost, for comparison
GROUPS = (256, 128, 64, 32)
EXACT, INT16, PER_TOKEN = "float32", "int16", "int8 per token"
OUTLIERS = (64.0, 128.0, 64.0, 128.0)  # powers of two: the float model keeps its bits


@dataclass(frozen=True, slots=True)
class Variant:
    """Weights of a scheme, and how the inputs of their matrices are rounded; None: not at all."""

    scheme: str
    inputs: str
    rounding: InputRounding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantQuality:
    """KL in bits per token: of the model in float32 to this, and of the same weights with exact inputs to this."""

    scheme: str
    inputs: str
    kl_mean: float
    kl_standard_error: float  # of windows
    kl_p999: float
    kl_of_inputs_mean: float
    kl_of_inputs_standard_error: float
    kl_of_inputs_p999: float
    top1_agreement: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBitsReport(Report):
    """All variants on one text."""

    model: str
    planted: bool
    text_sha256: str
    num_tokens: int
    num_bytes: int
    window: int
    bits_per_byte: float  # of the model in float32
    variants: list[VariantQuality]


@dataclass(slots=True)
class Scored:
    """Windows of one variant: beside the model in float32, and beside the same weights with exact inputs."""

    windows: list[TokenScores] = field(default_factory=list)
    of_inputs: list[TokenScores] = field(default_factory=list)


def variants_of(schemes: Sequence[str]) -> Iterator[Variant]:
    """bfloat16, then every scheme with exact inputs first and with each rounding that kernels could have."""
    yield Variant(BF16, BF16, None)
    for name in schemes:
        group = SCHEMES[name][1]
        yield Variant(name, EXACT, None)
        yield Variant(name, INT16, InputRounding(group or 256, 16))
        yield Variant(name, PER_TOKEN, InputRounding(0))
        for size in GROUPS:
            if group is None or size <= group:
                yield Variant(name, f"int8 per {size}", InputRounding(size))


def planted(program: Program, weights: Mapping[str, Array]) -> dict[str, Array]:
    """The same function with outliers: some outputs of norms and of `up` matrices grow, and their readers shrink."""
    out = {name: np.array(weight) for name, weight in weights.items()}
    readers = {name: [op for op in program.ops if name in op.inputs] for op in program.ops for name in op.outputs}
    makers = {name: op for op in program.ops for name in op.outputs}

    def move(grown: str, through: Sequence[str]) -> None:
        size = out[grown].shape[0]
        for number, factor in enumerate(OUTLIERS):
            channel = (2 * number + 1) * size // (2 * len(OUTLIERS))
            out[grown][channel] *= factor
            for name in through:
                out[name][:, channel] /= factor

    tables = {op.weights[0] for op in program.ops if op.kind == "embed"}
    for op in program.ops:
        found = [reader for name in op.outputs for reader in readers[name]]
        through = [reader.weights[0] for reader in found if reader.kind in MATRIX_OPS]
        if not found or len(through) < len(found) or not tables.isdisjoint(through):
            continue
        if op.kind == "rmsnorm" and len(op.weights) == 1:
            move(op.weights[0], through)
        elif op.kind == "gated_activation":
            move(makers[op.inputs[1]].weights[0], through)
    return out


def kl_bits(windows: Sequence[TokenScores]) -> tuple[float, float, float]:
    """Mean KL in bits per token, its standard error from windows, and the 99.9 percentile."""
    kl = ratio([BITS * float(each.kl_T.sum()) for each in windows], [len(each.kl_T) for each in windows])
    return kl.mean, kl.standard_error, BITS * float(np.quantile(np.concatenate([each.kl_T for each in windows]), 0.999))


def quality(variant: Variant, scored: Scored, num_tokens: int, num_bytes: int) -> VariantQuality:
    """The figures of one variant."""
    mean, error, p999 = kl_bits(scored.windows)
    inputs_mean, inputs_error, inputs_p999 = kl_bits(scored.of_inputs)
    return VariantQuality(
        scheme=variant.scheme,
        inputs=variant.inputs,
        kl_mean=mean,
        kl_standard_error=error,
        kl_p999=p999,
        kl_of_inputs_mean=inputs_mean,
        kl_of_inputs_standard_error=inputs_error,
        kl_of_inputs_p999=inputs_p999,
        top1_agreement=sum(int(each.agrees_T.sum()) for each in scored.windows) / num_tokens,
        bits_per_byte=-BITS * sum(float(each.logprob_T.sum()) for each in scored.windows) / num_bytes,
    )


def read_windows(folder: ModelFolder, options: argparse.Namespace) -> tuple[str, list[list[int]], int]:
    """The text that is read, its whole windows of token ids, and the bytes that their predicted tokens stand for."""
    tokenizer = folder.tokenizer()
    if tokenizer is None:
        raise SystemExit("the model has no tokenizer, so it cannot read text")
    text = "".join(path.read_text(encoding="utf-8") for path in options.text)[: 16 * options.tokens]
    ids = tokenizer.encode(text)[: options.tokens]
    windows = [window for window in cut(ids, options.window) if len(window) == options.window]
    if not windows:
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than a window of {options.window}")
    return text, windows, sum(len(tokenizer.token_bytes(token_id)) for ids in windows for token_id in ids[1:])


@torch.inference_mode()
def measure(options: argparse.Namespace) -> InputBitsReport:
    """All variants, window by window."""
    model = open_model(EngineConfig.of(options.model, dtype="float32"))
    program = model.program
    weights: Mapping[str, Array] = load_weights(model.folder, model.spec, model.base, FLOAT32)
    if options.planted:
        weights = planted(program, weights)
    text, windows, num_bytes = read_windows(model.folder, options)
    num_tokens = sum(len(window) - 1 for window in windows)

    chosen = quantized_names(program, embeddings=True)
    of_scheme = {
        name: as_tensors(
            dequantized_weights(program, weights, kind, scheme(kind).stored_format(group, False), embeddings=True)
        )
        for name, (kind, group) in SCHEMES.items()
        if name in options.schemes
    }
    of_scheme[BF16] = {name: weight.bfloat16() for name, weight in as_tensors(weights).items()}
    variants = list(variants_of(options.schemes))
    programs = [
        program if each.rounding is None else with_rounded_inputs(program, dict.fromkeys(chosen, each.rounding))
        for each in variants
    ]
    base_weights = as_tensors(weights)
    found = [Scored() for _ in variants]
    for window in windows:
        ids_1T, next_T = torch.tensor([window[:-1]]), np.array(window[1:])

        def logits(program: Program, weights: Mapping[str, torch.Tensor], ids_1T: torch.Tensor) -> np.ndarray:
            return dense_logits(program, weights, ids_1T)[0].float().numpy()

        base_TV = exact_TV = logits(program, base_weights, ids_1T)
        for variant, rounded, scored in zip(variants, programs, found, strict=True):
            logits_TV = logits(rounded, of_scheme[variant.scheme], ids_1T)
            exact_TV = logits_TV if variant.rounding is None else exact_TV
            scored.windows.append(score_tokens(logits_TV, base_TV, next_T))
            scored.of_inputs.append(score_tokens(logits_TV, exact_TV, next_T))
    base_bits = -BITS * sum(float(each.base_logprob_T.sum()) for each in found[0].windows)
    return InputBitsReport(
        name=f"input-bits-{model.folder.name}{'-planted' if options.planted else ''}",
        model=model.folder.name,
        planted=options.planted,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        window=options.window,
        bits_per_byte=base_bits / num_bytes,
        variants=[quality(each, sums, num_tokens, num_bytes) for each, sums in zip(variants, found, strict=True)],
    )


def show(report: InputBitsReport) -> None:
    """A row per variant."""
    title = f"{report.name}: {report.num_tokens:,} tokens, float32 has {report.bits_per_byte:.5f} bits per byte"
    table = Table(title=title)
    for column in ("weights", "inputs", "KL, bits", "99.9 %", "of inputs alone", "99.9 %", "top-1", "bits/byte"):
        table.add_column(column, justify="left" if column in ("weights", "inputs") else "right", no_wrap=True)
    for row in report.variants:
        table.add_row(
            row.scheme,
            row.inputs,
            f"{row.kl_mean:.6f} ± {row.kl_standard_error:.6f}",
            f"{row.kl_p999:.4f}",
            f"{row.kl_of_inputs_mean:.6f} ± {row.kl_of_inputs_standard_error:.6f}",
            f"{row.kl_of_inputs_p999:.4f}",
            f"{row.top1_agreement:.2%}",
            f"{row.bits_per_byte:.5f}",
        )
    Console(width=130).print(table)


def main() -> None:
    """Read the options, measure, show and save."""
    parser = text_parser(__doc__)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["int8", "int4"])
    parser.add_argument("--planted", action="store_true", help="plant channels of outliers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = measure(options)
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
