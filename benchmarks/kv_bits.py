"""What rounding keys and values costs: the exact KL to the model in float32, for every type of the KV cache and others.

usage: python -m benchmarks.kv_bits --model python-9m --text FILE [FILE...] [--tokens 8192] [--window 512]
                                    [--variants NAME...] [--out FOLDER]

Windows of the text go through the model in float32 by the reference backend, with nothing rounded but keys (after their
rotation by position) and values. Beside what a cache can be asked for there are the alternatives that were not taken:
without rotated heads, scales of groups, KIVI's scales per channel and block of 32 tokens. Both models give the
probability of every entry of the vocabulary, so that the KL is exact. Nothing here is a timing, so a busy machine does
not matter.
"""

import argparse
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.common import save, text_parser
from benchmarks.input_bits import kl_bits, read_windows
from rich.console import Console
from rich.table import Table

from ridgeline.backends.reference import dense
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.bench.report import Report
from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import BFLOAT16, FLOAT32, Float32s
from ridgeline.engine.model import open_model
from ridgeline.program.op import KvState
from ridgeline.quality.comparison import TokenScores, score_tokens
from ridgeline.quant.kv import ENTRY_BYTES, as_cached, rotate, rotation_width
from ridgeline.weights.load import load_weights

KIVI_TOKENS = 32

Rounding = Callable[[Float32s], Float32s]  # of keys or values [T, K, D]


@dataclass(frozen=True, slots=True)
class Variant:
    """How keys and values are rounded, and the bits of an entry of a head of D entries, scales and all."""

    keys: Rounding
    values: Rounding
    bits: Callable[[int], float]


def plain(x: Float32s) -> Float32s:
    return x


def bf16(x: Float32s) -> Float32s:
    return x.astype(BFLOAT16).astype(np.float32)


def levels(x: Float32s, bits: int, group: int = 0, rotated: bool = True) -> Float32s:
    """Numbers of some bits with a scale per group of a head, all of it for 0; the extreme is the lowest of them."""
    half = np.float32(2 ** (bits - 1))
    turned = rotate(x) if rotated else x
    groups = turned.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    most, least = groups.max(-1, keepdims=True), groups.min(-1, keepdims=True)
    scale = np.where(-least > most, least, most) / -half
    found = np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0)
    back = (np.clip(np.rint(found), -half, half - 1) * scale).reshape(x.shape)
    return rotate(back) / np.float32(rotation_width(x.shape[-1])) if rotated else back


def by_channel(x: Float32s) -> Float32s:
    """KIVI's keys: per channel and block of tokens a float16 scale and minimum; tokens of an unfinished block stay."""
    whole = len(x) // KIVI_TOKENS * KIVI_TOKENS
    blocks = x[:whole].reshape(-1, KIVI_TOKENS, *x.shape[1:])
    return np.concatenate([with_minimum(blocks, 1).reshape(-1, *x.shape[1:]), x[whole:]])


def with_minimum(x: Float32s, axis: int = -1) -> Float32s:
    """16 levels from the smallest to the largest along an axis, both float16."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    low, scale = (each.astype(np.float16).astype(np.float32) for each in (low, (high - low) / np.float32(15)))
    levels = np.divide(x - low, scale, out=np.zeros_like(x), where=scale != 0)
    return np.clip(np.rint(levels), 0, 15) * scale + low


def cached(kv_dtype: str) -> Variant:
    """What a cache can be asked for."""
    bits = 8 * ENTRY_BYTES[kv_dtype]
    return Variant(
        partial(as_cached, kv_dtype, keys=True),
        partial(as_cached, kv_dtype, keys=False),
        lambda head_dim: bits + 16 / head_dim,
    )


def of_bits(keys: int, values: int, group: int = 0, *, rotated: bool = True) -> Variant:
    """Keys and values of so many bits; 0: exact. A scale has 16 bits."""

    def each(bits: int) -> Rounding:
        return partial(levels, bits=bits, group=group, rotated=rotated) if bits else plain

    share: Callable[[int], float] = lambda head_dim: 16 / (group or head_dim)  # noqa: E731
    return Variant(each(keys), each(values), lambda head_dim: (keys + values) / 2 + share(head_dim))


VARIANTS: Mapping[str, Variant] = {
    "bfloat16": Variant(bf16, bf16, lambda _: 16),
    "int8": cached("int8"),
    "fp8": cached("fp8"),
    "int4": cached("int4"),
    "keys 6, values 4": of_bits(6, 4),
    "keys 6, values 4, not rotated": of_bits(6, 4, rotated=False),
    "keys 8, values 4": of_bits(8, 4),
    "keys 5, values 5": of_bits(5, 5),
    "keys 5, values 4": of_bits(5, 4),
    "keys 4, values 4": of_bits(4, 4),
    "keys 4, values 4, groups of 32": of_bits(4, 4, 32),
    "keys 4, values 4, not rotated": of_bits(4, 4, rotated=False),
    "keys 4, values 4, KIVI": Variant(by_channel, with_minimum, lambda head_dim: 4 + (1 + 32 / head_dim) / 2),
    "keys 6 alone": of_bits(6, 0),
    "keys 4 alone": of_bits(4, 0),
    "values 4 alone": of_bits(0, 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantQuality:
    """KL in nats per token of the model in float32 to this one."""

    variant: str
    bits: float  # of an entry
    of_bf16: float  # bytes to bfloat16's
    kl_mean_nats: float
    kl_standard_error_nats: float  # of windows
    kl_p999_nats: float
    top1_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBitsReport(Report):
    """All variants on one text."""

    model: str
    text_sha256: str
    num_tokens: int
    window: int
    head_dim: int
    variants: list[VariantQuality]


class RoundedMemory(dense.DenseMemory):
    """Keys and values of whole sequences as a cache would have as_cached them."""

    variant: Variant

    def write(self, state: int, *entries_TKD: torch.Tensor) -> None:
        each = zip((self.variant.keys, self.variant.values), entries_TKD, strict=True)
        super().write(state, *(torch.from_numpy(rounding(entries.numpy())) for rounding, entries in each))


@torch.inference_mode()
def measure(options: argparse.Namespace) -> KvBitsReport:
    """All variants, window by window."""
    model = open_model(EngineConfig.of(options.model, dtype="float32"))
    head_dims = {state.head_dim for state in model.program.states if isinstance(state, KvState)}
    weights = as_tensors(load_weights(model.folder, model.spec, model.base, FLOAT32))
    text, windows, _ = read_windows(model.folder, options)
    found: dict[str, list[TokenScores]] = {name: [] for name in options.variants}
    for window in windows:
        ids_1T, next_T = torch.tensor([window[:-1]]), np.array(window[1:])
        base_TV = dense.dense_logits(model.program, weights, ids_1T)[0].float().numpy()
        for name in options.variants:
            rounded = type("Rounded", (RoundedMemory,), {"variant": VARIANTS[name]})
            with patch.object(dense, "DenseMemory", rounded):
                logits_TV = dense.dense_logits(model.program, weights, ids_1T)[0].float().numpy()
            found[name].append(score_tokens(logits_TV, base_TV, next_T))
    num_tokens = sum(len(window) - 1 for window in windows)
    return KvBitsReport(
        name=f"kv-bits-{model.folder.name}",
        model=model.folder.name,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        num_tokens=num_tokens,
        window=options.window,
        head_dim=max(head_dims),
        variants=[quality(name, each, max(head_dims)) for name, each in found.items()],
    )


def quality(name: str, windows: list[TokenScores], head_dim: int) -> VariantQuality:
    """The figures of one variant."""
    mean, error, p999 = (bits * float(np.log(2)) for bits in kl_bits(windows))
    agreed = np.concatenate([each.agrees_T for each in windows])
    bits = VARIANTS[name].bits(head_dim)
    return VariantQuality(
        variant=name,
        bits=bits,
        of_bf16=bits / 16,
        kl_mean_nats=mean,
        kl_standard_error_nats=error,
        kl_p999_nats=p999,
        top1_agreement=float(agreed.mean()),
    )


def show(report: KvBitsReport) -> None:
    """A row per variant."""
    table = Table(title=f"{report.name}: {report.num_tokens:,} tokens in windows of {report.window}")
    for column in ("KV cache", "bits", "of bf16", "KL, nats a token", "99.9 %", "top-1"):
        table.add_column(column, justify="left" if column == "KV cache" else "right", no_wrap=True)
    for row in report.variants:
        table.add_row(
            row.variant,
            f"{row.bits:.2f}",
            f"{row.of_bf16:.0%}",
            f"{row.kl_mean_nats:.6f} ± {row.kl_standard_error_nats:.6f}",
            f"{row.kl_p999_nats:.4f}",
            f"{row.top1_agreement:.2%}",
        )
    Console(width=110).print(table)


def main() -> None:
    """Read the options, measure, show and save."""
    parser = text_parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = measure(options)
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
