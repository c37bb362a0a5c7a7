"""What llama.cpp computes of GGUF files beside what is computed here: exact KL, first choices, greedy texts.

usage: python -m benchmarks.gguf_round_trip FILE.gguf [...] --llama-python PATH --text FILE [--tokens 8192]
                                            [--window 512] [--out FOLDER]

PATH is the interpreter of an environment with llama-cpp-python. Both see the same token ids, those of the tokenizer
here. Inputs are of 16 bits here, and as llama.cpp has them there: rounded to 8 bits in groups of 32. Nothing here is a
timing.
"""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.common import save, text_parser
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams
from ridgeline.bench.report import Report
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.quality.comparison import Comparison, compare
from ridgeline.quality.scorer import Scorer
from ridgeline.quality.texts import Document, make_documents, read_texts

DRIVER = Path(__file__).parent / "peers" / "drivers" / "llama_logits.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAgreement:
    """One file or folder: KL(here || there), and how many tokens greedy texts have in common before they part."""

    file: str
    comparison: Comparison
    greedy_texts: int
    greedy_tokens: int  # of each
    greedy_equal_texts: int
    greedy_mean_equal_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTripReport(Report):
    """All files on one text."""

    llama_cpp_python: str
    text_sha256: str
    window: int
    files: list[FileAgreement]


def by_peer(
    options, command: list, more: list[str], file: Path, documents: list[Document], folder: Path
) -> dict[str, np.ndarray]:
    """What another engine's driver computes of the documents' windows, one of each.

    Raises CalledProcessError with what it wrote to stderr where it fails, the reason in the last line.
    """
    windows, out = folder / "windows.json", folder / "found.npz"
    windows.write_text(json.dumps([list(document.windows[0]) for document in documents]))
    sizes = [str(options.threads), str(options.window // 2)]
    subprocess.run([*command, file, *sizes, windows, out, *more], check=True, stderr=subprocess.PIPE, text=True)
    return dict(np.load(out))


def agreement(options, file: Path, folder: Path, command: list, more: list[str]) -> FileAgreement:
    """One file, there and here."""
    texts, inputs = read_texts(options.text), {"quantize_inputs": "int16", "dtype": "float32"}
    try:
        scorer = Scorer(EngineConfig.of(str(file), num_threads=options.threads, **inputs), options.window)
    except ConfigError:  # no matrix of integers
        inputs = {"dtype": "float32"}
        scorer = Scorer(EngineConfig.of(str(file), num_threads=options.threads, **inputs), options.window)
    documents = make_documents(texts, scorer.tokenizer(), scorer.window, options.tokens)
    found = by_peer(options, command, more, file, documents, folder)
    numbers = {tuple(document.windows[0][:-1]): number for number, document in enumerate(documents)}

    def there(token_ids):
        logits_TV = found[f"logits{numbers[tuple(token_ids)]}"]
        yield from (logits_TV[begin : begin + 256] for begin in range(0, len(logits_TV), 256))

    figures = compare(documents, there, scorer.logits, lambda done: None)
    half = options.window // 2
    whole = [document for document in documents if len(document.windows[0]) == options.window]
    llm = LLM(str(file), num_threads=options.threads, max_model_len=options.window, **inputs)
    params = SamplingParams(temperature=0, max_tokens=half, ignore_eos=True)
    outputs = llm.generate([list(each.windows[0][:half]) for each in whole], params, use_tqdm=False)
    equal = []
    for document, output in zip(whole, outputs, strict=True):
        theirs = found[f"greedy{numbers[tuple(document.windows[0][:-1])]}"]
        same = theirs == np.array(output.outputs[0].token_ids)[: len(theirs)]
        equal.append(len(same) if same.all() else int(same.argmin()))
    return FileAgreement(
        file=file.name,
        comparison=figures,
        greedy_texts=len(equal),
        greedy_tokens=half,
        greedy_equal_texts=equal.count(half),
        greedy_mean_equal_tokens=float(np.mean(equal)),
    )


def show(console: Console, files: list[FileAgreement]) -> None:
    """A row per file."""
    table = Table("file", "KL, bits per token", "same first choice", "greedy texts equal", "tokens before they part")
    for each in files:
        figures, texts = each.comparison, f"{each.greedy_equal_texts} of {each.greedy_texts}"
        kl, top1 = f"{figures.kl.mean:.5f} ± {figures.kl.standard_error:.5f}", f"{figures.top1_agreement.mean:.2%}"
        table.add_row(each.file, kl, top1, texts, f"{each.greedy_mean_equal_tokens:.0f} of {each.greedy_tokens}")
    console.print(table)


def main() -> None:
    parser = text_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama-python", required=True)
    options = parser.parse_args()
    asked = [options.llama_python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    version = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as temporary:
        command = [options.llama_python, DRIVER]
        files = [agreement(options, file, Path(temporary), command, []) for file in options.files]
    sha256, name = read_texts(options.text).sha256, "gguf-round-trip"
    report = RoundTripReport(
        name=name, llama_cpp_python=version, text_sha256=sha256, window=options.window, files=files
    )
    show(Console(), files)
    save(options.out, report)


if __name__ == "__main__":
    main()
