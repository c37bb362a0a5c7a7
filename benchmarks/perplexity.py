"""What each dtype costs in quality: exact KL and bits per byte on held-out text, beside float32 on the same tokens.

usage: python benchmarks/perplexity.py [--model python-9m] [--text FILE...] [--formats NAME...] [--folders PATH...]
                                        [--methods NAME...] [--calibration FILE] [--group-size 128] [--tokens N]

Every format is scored as `ridgeline evaluate` does it: windows of a document, none across documents. The default text
is what the bundled models never saw: the held-out modules of the standard library. With --methods `ridgeline quantize`
makes a folder by each first, which is gone at the end. A GGUF file counts as what its numbers mean: the base is that
in float32, and formats are made of it. Nothing here is a timing, so a busy machine does not matter.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ridgeline.bench.report import Report, save_report
from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import FLOAT32, Float32s
from ridgeline.core.machine import usable_cores
from ridgeline.program.lower import lower
from ridgeline.quality.comparison import Comparison, compare
from ridgeline.quality.scorer import Scorer
from ridgeline.quality.texts import make_documents, read_texts
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import QUANTIZATION, ModelFolder
from ridgeline.weights.load import StreamedWeights
from ridgeline.weights.save import save_weights

BASE = "float32"

INPUTS16: dict[str, object] = {"quantize_inputs": "int16"}
INPUTS8: dict[str, object] = {"quantize_inputs": "int8"}
PLAIN: dict[str, object] = {"quantize_embeddings": False}
INT4: dict[str, object] = INPUTS16 | {"quantize": "int4"}
FLOATS_4 = ("mxfp4", "nvfp4", "nf4")
INTEGERS = ("rtn", "gptq", "awq")  # methods whose groups are those of --group-size

# Name -> keywords of LLM. What is not said is as a user gets it: bfloat16 for a checkpoint of bfloat16.
FORMATS: dict[str, dict[str, object]] = {
    BASE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    **{f"bfloat16, KV {kind}": {"dtype": "bfloat16", "kv_dtype": kind} for kind in ("int8", "fp8", "int4")},
    "int8": {"quantize": "int8"} | INPUTS16,
    "int8 W8A8": {"quantize": "int8"} | INPUTS8,
    "int8, KV int8": {"quantize": "int8", "kv_dtype": "int8"} | INPUTS16,
    "int4 g32": INT4 | {"quantize_group_size": 32},
    "int4 g32, zero points": INT4 | {"quantize_group_size": 32, "quantize_zero_points": True},
    "int4 g32, plain embeddings": INT4 | PLAIN | {"quantize_group_size": 32},
    "int4 g32 W4A8": INT4 | INPUTS8 | {"quantize_group_size": 32},
    "int4 g64": INT4 | {"quantize_group_size": 64},
    "int4 g128": INT4 | {"quantize_group_size": 128},
    "int4 g128, plain embeddings": INT4 | PLAIN | {"quantize_group_size": 128},
    "int4 g128 W4A8, plain embeddings": INT4 | INPUTS8 | PLAIN | {"quantize_group_size": 128},
    **{f"{name}, plain embeddings": INPUTS16 | PLAIN | {"quantize": name} for name in ("int8", *FLOATS_4)},
    **{f"{name} inputs 8, plain embeddings": INPUTS8 | PLAIN | {"quantize": name} for name in ("int8", *FLOATS_4)},
    "fp8, plain embeddings": PLAIN | {"quantize": "fp8"},
}
# What `ridgeline quantize` is told of a method, where that is more than its name.
METHODS: dict[str, list[str]] = {
    **{name: [] for name in (*INTEGERS, "hqq", "smoothquant", "llm-int8", "fp8", *FLOATS_4)},
    "gptq-mean-bits-5": ["--method", "gptq", "--mean-bits", "5"],
    "gptq-8-bits": ["--method", "gptq", "--bits", "8"],
    **{f"{name}-rotated": ["--method", name, "--rotate"] for name in ("rtn", "gptq")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatQuality:
    """One format beside float32."""

    name: str  # of the format, or of the folder
    options: dict[str, object]
    weight_bytes: int
    bits: float  # of a parameter in the mean: embeddings, norms and scales count
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityReport(Report):
    """All formats on one text."""

    model: str
    isa: str
    kernels: str  # of the last format: the product of bfloat16 changes bits
    text: str
    text_sha256: str
    window: int
    formats: list[FormatQuality]


def decoded(model: str, into: Path) -> str:
    """The model, or of a GGUF file a folder of what its numbers mean, to be used as bfloat16 where nothing is said."""
    folder = ModelFolder.open(model)
    if folder.gguf is None:
        return model
    spec = read_spec(folder.config)
    program, out = lower(spec), into / folder.name
    save_weights(out, spec, StreamedWeights(folder, spec, program, np.dtype(np.float32)), FLOAT32)
    config = {key: value for key, value in folder.config.items() if key != QUANTIZATION} | {"dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config))
    return str(out)


def quantized(arguments: argparse.Namespace, into: Path) -> list[Path]:
    """The folders of the methods asked for, made by `ridgeline quantize` without a measurement of its own."""
    made: list[Path] = []
    for name in arguments.methods:
        made.append(into / name)
        command = [sys.executable, "-c", "from ridgeline.cli import main; main()", "quantize", arguments.model]
        command += [*(METHODS[name] or ["--method", name]), "--out", str(made[-1]), "--eval-tokens", "0"]
        command += ["--samples", str(arguments.samples), "--num-threads", str(arguments.threads)]
        command += ["--text", str(arguments.calibration)] if arguments.calibration else []
        if name.startswith(INTEGERS) and name != "gptq-8-bits":
            command += ["--group-size", str(arguments.group_size)]
        subprocess.run(command, check=True)
    return made


@dataclass(frozen=True, slots=True)
class Remembered:
    """The base's logits, computed once for all formats and stored on disk."""

    base: Scorer
    folder: Path

    def logits(self, token_ids: Sequence[int]) -> Iterator[Float32s]:
        """Logits of a window, in the chunks in which every model gives them."""
        known = self.folder / str(hash(tuple(token_ids)))
        if not known.exists():
            known.mkdir()
            for number, logits_TV in enumerate(self.base.logits(token_ids)):
                np.save(known / f"{number:04}.npy", logits_TV)
        yield from (np.load(path, mmap_mode="r") for path in sorted(known.iterdir()))


def measure(arguments: argparse.Namespace, into: Path, console: Console) -> PerplexityReport:
    """float32, then every format asked for; folders with inputs of 16 bits and of 8."""
    texts = read_texts(arguments.text)
    model = decoded(arguments.model, into)
    made = quantized(arguments, into)
    folders = {folder.name: (folder, INPUTS16) for folder in (*arguments.folders, *made)}
    folders |= {f"{folder.name} inputs 8": (folder, INPUTS8) for folder in made if folder.name != "fp8"}
    if "fp8" in folders:  # has no integers, so no choice of its inputs
        folders["fp8"] = folders["fp8"][0], {}

    def start(name: str) -> Scorer:
        of, options = folders[name] if name in folders else (model, FORMATS[name])
        return Scorer(EngineConfig.of(str(of), num_threads=arguments.threads, **options), arguments.window)

    base = start(BASE)
    tokenizer = ModelFolder.open(arguments.model).tokenizer()
    assert tokenizer is not None, "a model that reads text has a tokenizer"
    documents = make_documents(texts, tokenizer, base.window, arguments.tokens)
    remembered = Remembered(base, into / "logits")
    remembered.folder.mkdir()
    found: list[FormatQuality] = []
    scorer = base
    for name in [BASE, *(name for name in arguments.formats if name != BASE), *folders]:
        if name != BASE:
            scorer = start(name)
        logits = remembered.logits if name == BASE else scorer.logits
        figures = compare(documents, logits, None if name == BASE else remembered.logits, lambda done: None)
        options = folders[name][1] if name in folders else FORMATS[name]
        size, bits = scorer.weight_bytes, 32 * scorer.weight_bytes / base.weight_bytes
        found.append(FormatQuality(name=name, options=options, weight_bytes=size, bits=bits, comparison=figures))
        console.print(f"{name}: {figures.bits_per_byte:.4f} bits per byte", highlight=False)
    return PerplexityReport(
        name=f"perplexity-{base.name.removesuffix('.gguf')}",
        model=base.name,
        isa=scorer.choices["isa"].value,
        kernels=scorer.choices["kernels"].value,
        text=texts.source,
        text_sha256=texts.sha256,
        window=base.window,
        formats=found,
    )


def print_table(console: Console, report: PerplexityReport) -> None:
    """A row per format."""
    size = report.formats[0].comparison
    table = Table(title=f"{report.model}: {size.num_bytes:,} bytes, {size.num_tokens:,} tokens, {report.text}")
    for column in ("format", "MB", "bits", "bits/byte", "above float32", "top-1", "KL, bits", "99.9 %"):
        table.add_column(column, justify="left" if column == "format" else "right", no_wrap=True)
    for row in report.formats:
        figures = row.comparison
        above, kl = figures.bits_per_byte_above_base, figures.kl
        table.add_row(
            row.name,
            f"{row.weight_bytes / 1e6:.1f}",
            f"{row.bits:.2f}",
            f"{figures.bits_per_byte:.4f}",
            f"{above.mean:+.5f} ± {above.standard_error:.5f}",
            f"{figures.top1_agreement.mean:.2%}",
            f"{kl.mean:.5f} ± {kl.standard_error:.5f}",
            f"{figures.kl_quantiles['0.999']:.4f}",
        )
    console.print(table)


def main() -> None:
    """Reads the options, measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="python-9m", help="folder, .gguf file, hub id or bundled model")
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="a document each, UTF-8")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), metavar="NAME")
    parser.add_argument(
        "--folders", nargs="+", type=Path, default=[], metavar="PATH", help="folders and files that were made of it"
    )
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[], metavar="NAME")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="text that methods look at; default: Python")
    parser.add_argument("--samples", type=int, default=128, help="windows of it")
    parser.add_argument("--group-size", type=int, default=128, help="of integers of 4 bits that methods make")
    parser.add_argument("--window", type=int, default=1024, help="tokens that the model sees at most")
    parser.add_argument("--tokens", type=int, help="of all documents, at most; default: all")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if arguments.window < 2 or (arguments.tokens is not None and arguments.tokens < 1):
        parser.error("a window has 2 tokens or more, and there is at least one")
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as temporary:
        report = measure(arguments, Path(temporary), console)
    path = save_report(arguments.out, report)
    print_table(console, report)
    console.print(f"written: {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
