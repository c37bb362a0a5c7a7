"""What each dtype costs in quality: bits per byte on held-out text, beside float32 on the same tokens.

usage: python benchmarks/perplexity.py [--model python-9m] [--text FILE...] [--formats NAME...] [--windows N]

Every format runs through the engine's own path: windows of a document as prompts, scored by prompt_logprobs. Windows do
not cross documents, and each starts with the last token of the one before. The default text is what the bundled models
never saw: the held-out modules of the standard library. Nothing here is a timing, so a busy machine does not matter.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams
from ridgeline.bench.report import Report, save_report
from ridgeline.compress.corpus import split, standard_library
from ridgeline.core.machine import usable_cores

NUM_TOP = 20  # alternatives that the engine gives of a token: the whole of what KL can be taken over
BASE = "float32"

INT4: dict[str, object] = {"quantize": "int4", "quantize_inputs": "int16"}

# Name -> keywords of LLM. What is not said is as a user gets it: bfloat16 for a checkpoint of bfloat16.
FORMATS: dict[str, dict[str, object]] = {
    BASE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8": {"quantize": "int8", "quantize_inputs": "int16"},
    "int8 W8A8": {"quantize": "int8", "quantize_inputs": "int8"},
    "int8, KV int8": {"quantize": "int8", "quantize_inputs": "int16", "kv_dtype": "int8"},
    "int4 g32": INT4 | {"quantize_group_size": 32},
    "int4 g32, zero points": INT4 | {"quantize_group_size": 32, "quantize_zero_points": True},
    "int4 g32, plain embeddings": INT4 | {"quantize_group_size": 32, "quantize_embeddings": False},
    "int4 g32 W4A8": INT4 | {"quantize_group_size": 32, "quantize_inputs": "int8"},
    "int4 g128": INT4 | {"quantize_group_size": 128},
    "int4 g128, plain embeddings": INT4 | {"quantize_group_size": 128, "quantize_embeddings": False},
}


@dataclass(frozen=True, slots=True)
class Document:
    """Windows of token ids [at most `window` each], and the bytes of text that their predicted tokens stand for."""

    name: str
    windows: list[list[int]]
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted: all but the first of each window."""
        return sum(len(window) - 1 for window in self.windows)


@dataclass(frozen=True, slots=True)
class Scores:
    """The T predicted tokens of one document: natural log-probabilities, and the K likeliest tokens, best first."""

    logprob_T: np.ndarray
    top_ids_TK: np.ndarray
    top_logprobs_TK: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatQuality:
    """One format over all documents. `delta` is bits per byte above float32, its error from documents in pairs.

    `top1_agreement` is the share of tokens whose most likely prediction is float32's. `kl_lumped_bits` is the mean
    KL(float32 || this) in bits per token, with all tokens that are not among both top 20 counted as one: a lower bound.
    """

    name: str
    options: dict[str, object]
    weight_bytes: int
    bits_per_byte: float
    perplexity: float  # per token
    delta: float
    delta_standard_error: float
    top1_agreement: float
    kl_lumped_bits: float
    bits_by_document: dict[str, float]  # not per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """What was read: the text's SHA-256, in the order of the documents, and how it was cut."""

    source: str
    sha256: str
    documents: dict[str, int]  # name -> bytes that were predicted
    num_bytes: int
    num_tokens: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityReport(Report):
    """All formats on one text."""

    model: str
    isa: str
    kernels: str  # of the last format: the product of bfloat16 changes bits
    text: TextFacts
    formats: list[FormatQuality]


# ---- text


def read_documents(paths: Sequence[Path]) -> tuple[str, dict[str, str]]:
    """(what it is, name -> text): the files, or the standard library's held-out modules where there are none."""
    if paths:
        return "files", {path.name: path.read_text(encoding="utf-8") for path in paths}
    _, held_out = split(standard_library())
    return "held-out modules of the standard library", {file.path: file.text for file in held_out}


def cut(token_ids: Sequence[int], window: int) -> list[list[int]]:
    """Windows of at most `window` tokens that predict every token but the first exactly once."""
    starts = range(0, len(token_ids) - 1, window - 1)
    return [list(token_ids[start : start + window]) for start in starts]


def make_documents(llm: LLM, texts: dict[str, str], window: int, most_windows: int | None) -> list[Document]:
    """The texts in the model's tokens; of each the first `most_windows` windows."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise SystemExit("the model has no tokenizer, so it cannot read text")
    documents = []
    for name, text in texts.items():
        windows = cut(tokenizer.encode(text), window)[:most_windows]
        num_bytes = sum(len(tokenizer.token_bytes(token_id)) for ids in windows for token_id in ids[1:])
        if num_bytes:
            documents.append(Document(name, windows, num_bytes))
    return documents


# ---- scores


def score(llm: LLM, document: Document) -> Scores:
    """What the model says of every predicted token of the document."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=NUM_TOP)
    outputs = llm.generate(document.windows, params, use_tqdm=False)
    entries = [entry for output in outputs for entry in output.prompt_logprobs if entry is not None]
    num_top = min(len(entry.top) for entry in entries)
    return Scores(
        np.array([entry.logprob for entry in entries]),
        np.array([[token_id for token_id, _ in entry.top[:num_top]] for entry in entries]),
        np.array([[logprob for _, logprob in entry.top[:num_top]] for entry in entries]),
    )


def lumped_kl(base: Scores, other: Scores) -> np.ndarray:
    """KL(base || other) of each token, in nats [T]; tokens outside of either top K are one."""
    same_TKK = base.top_ids_TK[:, :, None] == other.top_ids_TK[:, None, :]
    shared_TK = same_TKK.any(2)
    log_p_TK = base.top_logprobs_TK
    log_q_TK = np.where(same_TKK, other.top_logprobs_TK[:, None, :], 0.0).sum(2)
    p_TK, q_TK = np.exp(log_p_TK) * shared_TK, np.exp(log_q_TK) * shared_TK
    tiny = np.finfo(np.float64).tiny
    rest_p_T, rest_q_T = (np.clip(1.0 - part_TK.sum(1), tiny, 1.0) for part_TK in (p_TK, q_TK))
    return (p_TK * (log_p_TK - log_q_TK)).sum(1) + rest_p_T * np.log(rest_p_T / rest_q_T)


def paired_difference(bits: Sequence[float], base_bits: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """(difference per byte, its standard error) of a text that is a sample of documents.

    The standard error is that of a ratio of sums: documents are long and short, and longer ones differ by more.
    NaN for a single document, which tells nothing about others.
    """
    d, n = np.asarray(bits) - np.asarray(base_bits), np.asarray(sizes)
    ratio = d.sum() / n.sum()
    if len(d) < 2:
        return float(ratio), math.nan
    residual = d - ratio * n
    error = math.sqrt(len(d) / (len(d) - 1) * float((residual**2).sum())) / n.sum()
    return float(ratio), float(error)


def compare(
    name: str, weight_bytes: int, documents: Sequence[Document], scores: Sequence[Scores], base: Sequence[Scores]
) -> FormatQuality:
    """A format's figures from what it and float32 said of the same tokens."""
    bits, base_bits = ([-float(s.logprob_T.sum()) / math.log(2) for s in each] for each in (scores, base))
    sizes = [document.num_bytes for document in documents]
    num_tokens = sum(document.num_tokens for document in documents)
    delta, error = paired_difference(bits, base_bits, sizes)
    agreed = sum(int((a.top_ids_TK[:, 0] == b.top_ids_TK[:, 0]).sum()) for a, b in zip(scores, base))
    kl_nats = sum(float(lumped_kl(b, a).sum()) for a, b in zip(scores, base))
    return FormatQuality(
        name=name,
        options=FORMATS[name],
        weight_bytes=weight_bytes,
        bits_per_byte=sum(bits) / sum(sizes),
        perplexity=2 ** (sum(bits) / num_tokens),
        delta=delta,
        delta_standard_error=error,
        top1_agreement=agreed / num_tokens,
        kl_lumped_bits=kl_nats / math.log(2) / num_tokens,
        bits_by_document={document.name: value for document, value in zip(documents, bits)},
    )


# ---- the run


def start(arguments: argparse.Namespace, name: str) -> LLM:
    """The model in one format. Nothing is cached: neither prefixes, which no window shares, nor packed weights."""
    return LLM(
        arguments.model,
        max_model_len=arguments.window + 1,
        max_num_seqs=8,
        enable_prefix_caching=False,
        pack_cache=False,
        num_threads=arguments.threads,
        **FORMATS[name],
    )


def measure(arguments: argparse.Namespace, console: Console) -> PerplexityReport:
    """float32, then every format asked for."""
    source, texts = read_documents(arguments.text)
    base: list[Scores] = []
    documents: list[Document] = []
    found: list[FormatQuality] = []
    llm = None
    for name in [BASE, *(name for name in arguments.formats if name != BASE)]:
        llm = None  # before the next one is loaded
        llm = start(arguments, name)
        documents = documents or make_documents(llm, texts, arguments.window, arguments.windows)
        scores = [score(llm, document) for document in documents]
        base = base or scores
        found.append(compare(name, llm.engine.info.weight_bytes, documents, scores, base))
        console.print(f"{name}: {found[-1].bits_per_byte:.4f} bits per byte", highlight=False)
    assert llm is not None, "there is always the base"
    return PerplexityReport(
        name=f"perplexity-{llm.engine.info.model_name}",
        model=llm.engine.info.model_name,
        isa=llm.engine.info.choices["isa"].value,
        kernels=llm.engine.info.choices["kernels"].value,
        text=TextFacts(
            source=source,
            sha256=hashlib.sha256(json.dumps(list(texts.items())).encode()).hexdigest(),
            documents={document.name: document.num_bytes for document in documents},
            num_bytes=sum(document.num_bytes for document in documents),
            num_tokens=sum(document.num_tokens for document in documents),
            window=arguments.window,
        ),
        formats=found,
    )


def print_table(console: Console, report: PerplexityReport) -> None:
    """A row per format."""
    text = report.text
    table = Table(title=f"{report.model}: {text.num_bytes:,} bytes, {text.num_tokens:,} tokens, {text.source}")
    for column in ("format", "MB", "bits/byte", "above float32", "perplexity", "top-1", "KL, bits"):
        table.add_column(column, justify="left" if column == "format" else "right", no_wrap=True)
    for row in report.formats:
        table.add_row(
            row.name,
            f"{row.weight_bytes / 1e6:.1f}",
            f"{row.bits_per_byte:.4f}",
            f"{row.delta:+.5f} ± {row.delta_standard_error:.5f}",
            f"{row.perplexity:.3f}",
            f"{row.top1_agreement:.2%}",
            f"{row.kl_lumped_bits:.5f}",
        )
    console.print(table)


def main() -> None:
    """Reads the options, measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="python-9m", help="folder, hub id or bundled model")
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="a document each, UTF-8")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="NAME")
    parser.add_argument("--window", type=int, default=1023, help="tokens that the model sees at most")
    parser.add_argument("--windows", type=int, help="of each document, at most; default: all of it")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if arguments.window < 2 or (arguments.windows is not None and arguments.windows < 1):
        parser.error("a window has 2 tokens or more, and there is at least one")
    console = Console(width=120)
    report = measure(arguments, console)
    path = save_report(arguments.out, report)
    print_table(console, report)
    console.print(f"written: {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
